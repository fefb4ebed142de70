"""Keys of one GGUF architecture alone: they are read, or the file is refused."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from actors.stage.gguf_folder import model_folder
from actors.stage.models.config import ModelError
from actors.stage.models.read import load_config
from actors.stage.weights.gguf_file import GgufFile
from actors.stage.weights.gguf_metadata import GgufMetadata
from tests.actors.stage.greedy_reference import make_prompts
from tests.actors.stage.mini_planner import MiniPlanner, make_chain
from tests.actors.stage.weights.gguf_files import write
from tests.actors.stage.weights.test_packed import GREEDY, LENGTHS, answers


def of_images(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_dimension_sections([2, 3, 3, 0])
    writer.add_num_deepstack_layers(3)


@pytest.mark.parametrize("variant", ["ministral3", "ernie4.5", "hunyuan", "arcee-biased"])
def test_families_of_2025(tmp_path: Path, variant: str) -> None:
    model = write(tmp_path / "tiny.gguf", variant)
    folder = model_folder(tmp_path, tmp_path / "cache")
    planner = MiniPlanner(make_chain(folder, 2), feeds=True)
    assert planner.run(make_prompts(LENGTHS), GREEDY) == answers(model)


@pytest.mark.parametrize(("variant", "architecture"), [("qwen2", "qwen2vl"), ("qwen3", "qwen3vl")])
def test_decoders_of_models_of_images(tmp_path: Path, variant: str, architecture: str) -> None:
    model = write(tmp_path / "tiny.gguf", variant, architecture=architecture, tune=of_images)
    folder = model_folder(tmp_path, tmp_path / "cache")
    assert MiniPlanner(make_chain(folder)).run(make_prompts(LENGTHS), GREEDY) == answers(model)


def test_mistral_without_yarn_is_of_that_architecture_too(tmp_path: Path) -> None:
    write(tmp_path / "tiny.gguf", "mistral-unlimited", architecture="mistral3")
    config = load_config(model_folder(tmp_path, tmp_path / "cache"))
    assert (config.architecture, config.temperature) == ("Ministral3ForCausalLM", None)
    assert config.ropes[0].kind == "default"


def test_a_key_that_was_not_read_is_found(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write(path, "arcee", tune=lambda w: w.add_attn_temperature_scale(0.5))
    metadata = GgufMetadata(GgufFile(path))
    for key in ("block_count", "embedding_length"):
        assert metadata.number(key) == metadata.get(key)
    assert metadata.unread() == "arcee.context_length"
    with pytest.raises(ModelError, match=r"key arcee\.attention\.temperature_scale .* not known"):
        model_folder(tmp_path, tmp_path / "cache")
