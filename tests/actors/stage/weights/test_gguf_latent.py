"""GGUF files of DeepSeek-V2 and V3 give the tokens of the folders they were converted from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest

from actors.stage.gguf_folder import model_folder
from actors.stage.models.config import ModelError
from tests import tiny_models
from tests.actors.stage.greedy_reference import make_prompts
from tests.actors.stage.mini_planner import MiniPlanner, make_chain
from tests.actors.stage.weights.gguf_conversions import convert, latent, latent_keys
from tests.actors.stage.weights.gguf_files import write
from tests.actors.stage.weights.test_packed import GREEDY, LENGTHS, answers


@pytest.mark.parametrize("variant", ["deepseek-v2", "deepseek-v2-lite", "deepseek-v3"])
def test_families(tmp_path: Path, variant: str) -> None:
    path = tmp_path / "tiny.gguf"
    groups = {"n_group": 1, "topk_group": 1} if variant == "deepseek-v2-lite" else {}
    more: dict[str, Any] = {"first_k_dense_replace": 1, **groups}
    if variant == "deepseek-v3":  # the file has one of the two, which are equal where published
        given = tiny_models.VARIANTS[variant][1]["rope_parameters"]
        more["rope_parameters"] = {**given, "mscale": given["mscale_all_dim"]}
    model = convert(path, "deepseek2", variant, latent_keys, latent, **more)
    planner = MiniPlanner(make_chain(model_folder(path, tmp_path / "cache"), 2), feeds=True)
    assert planner.run(make_prompts(LENGTHS), GREEDY) == answers(model)


def test_older_files_and_other_scores_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"

    def by_softmax(writer: gguf.GGUFWriter, config: Any) -> None:
        latent_keys(writer, config)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)

    convert(path, "deepseek2", "deepseek-v3", by_softmax, latent, first_k_dense_replace=1)
    with pytest.raises(ModelError, match=r"expert_gating_func 1 is not supported with a correct"):
        model_folder(path, tmp_path / "cache")
    write(path, "llama", architecture="deepseek2")
    with pytest.raises(ModelError, match=r"tiny\.gguf is from before .*key_length_mla is missing"):
        model_folder(path, tmp_path / "cache")
