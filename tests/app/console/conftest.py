"""The browser of the console's tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.app.console.chromium import chromium


@pytest.fixture
def browser() -> Iterator[Any]:
    with chromium(1400, 1000) as driver:
        yield driver
