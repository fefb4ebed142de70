"""The browser of the console's tests, and a server for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.app.console.chromium import chromium
from tests.serve.server_process import ROOT, Server, running


@pytest.fixture
def browser() -> Iterator[Any]:
    with chromium(1400, 1000) as driver:
        yield driver


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    args = {
        "model": {"path": str(ROOT / "configs/models/demo")},
        "scheduling": {"token_budget": 128, "max_requests": 32},
        "kv": {"memory_gib": 0.3},
        "slo": {"tbt_ms": 1},  # which no step keeps
    }
    with running(tmp_path_factory.mktemp("console"), args) as started:
        yield started
