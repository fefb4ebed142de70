"""GGUF files of DeepSeek-V2 and V3 give the tokens of the folders they were converted from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from actors.stage.gguf_folder import model_folder
from actors.stage.models.config import ModelError
from tests import tiny_models
from tests.actors.stage.greedy_reference import make_prompts
from tests.actors.stage.mini_planner import MiniPlanner, make_chain
from tests.actors.stage.weights.gguf_conversions import (
    as_they_are,
    convert,
    latent,
    latent_keys,
    older_latent_keys,
)
from tests.actors.stage.weights.gguf_files import Kind
from tests.actors.stage.weights.test_packed import GREEDY, LENGTHS, answers

PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}


@pytest.mark.parametrize(
    "variant", ["deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "youtu", "youtu-yarn"]
)
def test_families(tmp_path: Path, variant: str) -> None:
    path = tmp_path / "tiny.gguf"
    groups = {"n_group": 1, "topk_group": 1} if variant == "deepseek-v2-lite" else {}
    more: dict[str, Any] = {"first_k_dense_replace": 1, **groups}
    if variant.startswith("youtu"):
        more = {"rope_interleave": True}  # of every file
    if variant in ("deepseek-v3", "youtu-yarn"):  # of two that are equal where published, files
        given = tiny_models.VARIANTS[variant][1]["rope_parameters"]  # have one
        more["rope_parameters"] = {**given, "mscale": given["mscale_all_dim"]}
    model = convert(path, "deepseek2", variant, latent_keys, latent, **more)
    planner = MiniPlanner(make_chain(model_folder(path, tmp_path / "cache"), 2), feeds=True)
    assert planner.run(make_prompts(LENGTHS), GREEDY) == answers(model)


@pytest.mark.parametrize(
    ("variant", "kind"), [("deepseek-v2", Kind.F32), ("deepseek-v3", Kind.Q8_0)]
)
def test_older_files_have_keys_and_values_in_one_tensor(
    tmp_path: Path, variant: str, kind: Kind
) -> None:
    path = tmp_path / "tiny.gguf"
    more: dict[str, Any] = {"first_k_dense_replace": 1, "rope_parameters": PLAIN}
    if kind == Kind.Q8_0:  # of whole blocks
        more |= {"q_lora_rank": 64, "v_head_dim": 16}
    model = convert(path, "deepseek2", variant, older_latent_keys, as_they_are, kind, **more)
    folder = model_folder(path, tmp_path / "cache")
    planner = MiniPlanner(make_chain(folder, 2, dtype="float32"), feeds=True)
    assert planner.run(make_prompts(LENGTHS), GREEDY) == answers(model)


def minicpm3_keys(writer: gguf.GGUFWriter, config: Any) -> None:
    plain, rotated = config.qk_nope_head_dim, config.qk_rope_head_dim
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length(plain + rotated)
    writer.kv_data[0].pop("minicpm3.attention.value_length", None)  # files have none
    writer.add_rope_dimension_count(rotated)
    if config.rope_parameters["rope_type"] == "longrope":
        for which in ("long", "short"):
            factors = np.array(config.rope_parameters[f"{which}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{which}.weight", factors)


@pytest.mark.parametrize("scaled", [False, True])
def test_minicpm3(tmp_path: Path, scaled: bool) -> None:
    path = tmp_path / "tiny.gguf"
    more: dict[str, Any] = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}
    if scaled:
        factors = {f"{which}_factor": [1.0, 1.5, 2.0, 3.0] for which in ("short", "long")}
        length = {"original_max_position_embeddings": 256}
        more["rope_parameters"] = {**PLAIN, "rope_type": "longrope", **factors, **length}
    model = convert(path, "minicpm3", "minicpm3", minicpm3_keys, as_they_are, **more)
    planner = MiniPlanner(make_chain(model_folder(path, tmp_path / "cache"), 2), feeds=True)
    assert planner.run(make_prompts(LENGTHS), GREEDY) == answers(model)


def test_other_scores_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"

    def by_softmax(writer: gguf.GGUFWriter, config: Any) -> None:
        latent_keys(writer, config)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)

    convert(path, "deepseek2", "deepseek-v3", by_softmax, latent, first_k_dense_replace=1)
    with pytest.raises(ModelError, match=r"expert_gating_func 1 is not supported with a correct"):
        model_folder(path, tmp_path / "cache")
