"""What families of GGUF files share."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from actors.stage.models.config import ModelError
from actors.stage.weights.gguf_family import MLP_NORM, GgufFamily, of_layers, only
from actors.stage.weights.gguf_file import GgufFile
from actors.stage.weights.gguf_metadata import GgufMetadata
from tests.actors.stage.weights.gguf_files import write


def test_numbers_of_layers_are_one_where_they_are_not_zero(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write(
        path, "llama",
        tune=lambda w: (w.add_head_count_kv([2, 0, 2]), w.add_feed_forward_length([8, 9, 8])),
    )  # fmt: skip
    with closing(GgufFile(path)) as file:
        metadata = GgufMetadata(file)
        assert of_layers(metadata, "attention.head_count_kv") == [2, 0, 2]
        assert of_layers(metadata, "embedding_length") == [64] * 3
        with pytest.raises(ModelError, match=r"gguf: llama.feed_forward_length \[8, 9, 8\] is"):
            of_layers(metadata, "feed_forward_length")
        only(metadata, "embedding_length", 32, 64)
        with pytest.raises(ModelError, match=r"llama.embedding_length is 64; supported: 32, 48"):
            only(metadata, "embedding_length", 32, 48)


def test_names_of_tensors() -> None:
    family = GgufFamily("A", "a", renamed=MLP_NORM, without_ending=("ffn_norm",))
    assert family.called("ffn_norm") == "post_attention_norm"
    assert family.called("attn_norm") == "attn_norm"
    assert (family.whole("ffn_norm", "weight"), family.whole("x", "bias")) == ("ffn_norm", "x.bias")
    assert not family.adds_one("model.norm.weight")
