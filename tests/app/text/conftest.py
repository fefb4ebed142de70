from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.text.processor import TextProcessor
from tests.tiny_tokenizers import byte_level_folder


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextProcessor]:
    text = TextProcessor(byte_level_folder(Path(tmp_path_factory.mktemp("bytes"))))
    yield text
    text.close()
