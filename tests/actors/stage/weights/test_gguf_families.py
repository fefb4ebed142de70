"""The GGUF architectures that are read, and others."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from actors.stage.models.config import ModelError
from actors.stage.weights.gguf_families import GGUF_FAMILIES, family_of
from actors.stage.weights.gguf_file import GgufFile
from tests.actors.stage.weights.gguf_files import write


def test_another_architecture_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write(path, "llama", num_hidden_layers=1)
    path.write_bytes(
        path.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0rwkv6")
    )
    with (
        closing(GgufFile(path)) as file,
        pytest.raises(ModelError, match="architecture 'rwkv6' is not supported in a GGUF file; su"),
    ):
        family_of(file)


def test_the_documents_tell_the_architectures() -> None:
    root = Path(__file__).resolve().parents[4]
    cell = f"| GGUF of {', '.join(GGUF_FAMILIES)} |"
    assert cell in (root / "actors/stage/README.md").read_text()
    number = len(GGUF_FAMILIES)
    assert f"GGUF file of {number} architectures" in (root / "README.md").read_text()
