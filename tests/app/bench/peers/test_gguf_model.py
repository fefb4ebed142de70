"""The GGUF file for llama.cpp holds the folder's model: read back, every tensor is the same."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import app.bench.peers
from actors.stage.models.read import load_config
from actors.stage.weights.gguf_file import GgufFile
from actors.stage.weights.gguf_weights import GgufWeights
from actors.stage.weights.names import all_shapes
from app.paths import CONFIGS

SCRIPT = Path(next(iter(app.bench.peers.__path__))) / "gguf_model.py"
DEMO = CONFIGS / "models/demo"


def converted(folder: Path, out: Path) -> Path:
    subprocess.run([sys.executable, str(SCRIPT), str(folder), str(out)], check=True, timeout=120)
    return out


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(DEMO, tmp_path_factory.mktemp("gguf") / "demo.gguf")


def test_every_tensor_is_the_folders(demo: Path) -> None:
    config = load_config(DEMO)
    tensors = load_file(DEMO / "model.safetensors")
    with contextlib.closing(GgufWeights(demo, config, torch.bfloat16)) as weights:
        for name, shape in all_shapes(config).items():
            if name in tensors:  # the head is the embedding
                assert torch.equal(weights.read(name, shape), tensors[name]), name


def test_its_tokens_are_the_tokenizers(demo: Path) -> None:
    with contextlib.closing(GgufFile(demo)) as file:
        tokens = file.metadata["tokenizer.ggml.tokens"]
        kinds = file.metadata["tokenizer.ggml.token_type"]
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    assert {token: number for number, token in enumerate(tokens)} == tokenizer["model"]["vocab"]
    special = [token["id"] for token in tokenizer["added_tokens"]]
    assert [number for number, kind in enumerate(kinds) if kind == 3] == special


def test_a_folder_without_weights_gets_random_ones(tmp_path: Path) -> None:
    config = json.loads((DEMO / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    path = converted(tmp_path, tmp_path / "random.gguf")
    read = load_config(tmp_path)
    with contextlib.closing(GgufWeights(path, read, torch.bfloat16)) as weights:
        embedding = weights.read("model.embed_tokens.weight", (4096, 256)).float()
        assert embedding.std().item() == pytest.approx(0.02, rel=0.01)
        norm = weights.read("model.norm.weight", (256,))
        assert torch.equal(norm, torch.ones(256, dtype=torch.bfloat16))


def test_a_smaller_tokenizer_is_filled_up_to_the_models_rows(tmp_path: Path) -> None:
    config = json.loads((DEMO / "config.json").read_text())
    rows = config["vocab_size"] + 64
    more = {"num_hidden_layers": 1, "vocab_size": rows}
    (tmp_path / "config.json").write_text(json.dumps({**config, **more}))
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    path = converted(tmp_path, tmp_path / "random.gguf")
    with contextlib.closing(GgufFile(path)) as file:
        tokens = file.metadata["tokenizer.ggml.tokens"]
    assert len(set(tokens)) == rows
