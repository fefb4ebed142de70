"""GGUF files of Gemma 4 give the tokens of the folders that they were converted from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest

from actors.stage.gguf_folder import model_folder
from actors.stage.models.config import ModelError
from tests.actors.stage.greedy_reference import make_prompts
from tests.actors.stage.mini_planner import MiniPlanner, make_chain
from tests.actors.stage.weights.gguf_conversions import convert, gemma4, gemma4_keys
from tests.actors.stage.weights.test_packed import GREEDY, LENGTHS, answers


@pytest.mark.parametrize(("variant", "stages"), [("gemma4", 2), ("gemma4-inputs", 1)])
def test_both_kinds(tmp_path: Path, variant: str, stages: int) -> None:
    """Experts beside an MLP, keys that are values too, and heads of two sizes; inputs of layers,
    and layers that attend to the keys of others."""
    path = tmp_path / "tiny.gguf"
    more: dict[str, Any] = {"attention_bias": False} if variant == "gemma4" else {}
    model = convert(path, "gemma4", variant, gemma4_keys, gemma4, **more)
    folder = model_folder(path, tmp_path / "cache")
    planner = MiniPlanner(make_chain(folder, stages), feeds=stages > 1)
    assert planner.run(make_prompts(LENGTHS), GREEDY) == answers(model)


def test_other_rotations_and_layers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"

    def of_other_sizes(writer: gguf.GGUFWriter, config: Any) -> None:
        gemma4_keys(writer, config)
        writer.add_rope_dimension_count_swa(8)

    def without_pattern(writer: gguf.GGUFWriter, config: Any) -> None:
        gemma4_keys(writer, config)
        writer.add_sliding_window_pattern(6)

    for keys, message in (
        (of_other_sizes, "rope.dimension_count_swa is not the head's size"),
        (without_pattern, "sliding_window_pattern 6 is not of 4 layers"),
    ):
        convert(path, "gemma4", "gemma4", keys, gemma4, attention_bias=False)
        with pytest.raises(ModelError, match=rf"tiny\.gguf: gemma4\..*{message}"):
            model_folder(path, tmp_path / "cache")
