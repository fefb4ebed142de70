"""Tensors that lie otherwise in a GGUF file than in a folder, stored as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from actors.stage.gguf_folder import model_folder
from actors.stage.models.config import ModelError
from actors.stage.models.read import load_config
from actors.stage.spec import StageSpec
from actors.stage.weights.folder import open_folder
from tests.actors.stage.greedy_reference import make_prompts
from tests.actors.stage.mini_planner import MiniPlanner, make_chain
from tests.actors.stage.rank_pool import RankPool
from tests.actors.stage.weights.gguf_conversions import Tensors, convert
from tests.actors.stage.weights.gguf_files import Kind
from tests.actors.stage.weights.gguf_hybrids import delta_rule, delta_rule_keys
from tests.actors.stage.weights.test_packed import GREEDY, LENGTHS, answers


def held(folder: Path, name: str) -> bool:
    """Whether a layer stays packed."""
    config, spec = load_config(folder), StageSpec(str(folder))
    with open_folder(folder, config, spec, torch.float32) as (_, packed):
        return packed is not None and f"model.layers.0.linear_attn.{name}" in packed


@pytest.mark.parametrize("width", [32, 24])
def test_columns_of_heads_are_moved_by_whole_blocks(
    tmp_path: Path, ranks: RankPool, width: int
) -> None:
    """Heads that are no whole blocks are turned into floats, and moved then; their numbers are
    not those of the folder, which has other blocks."""
    path = tmp_path / "tiny.gguf"
    model = convert(
        path, "qwen35", "qwen3-5", delta_rule_keys, delta_rule, Kind.Q8_0,
        linear_value_head_dim=width, linear_num_value_heads=8,
    )  # fmt: skip
    folder = model_folder(path, tmp_path / "cache")
    assert held(folder, "in_proj_qkv")
    assert held(folder, "out_proj") == (width == 32)
    if width == 32:
        agree(folder, ranks, answers(model))


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q6_K])
def test_columns_are_moved_within_blocks_of_many_heads(
    tmp_path: Path, ranks: RankPool, kind: Kind
) -> None:
    """A block of 256 columns holds eight heads, which lie in another order in the folder."""
    path = tmp_path / "tiny.gguf"
    model = convert(
        path, "qwen35", "qwen3-5", delta_rule_keys, delta_rule, kind, hidden_size=256,
        intermediate_size=256, head_dim=64, linear_value_head_dim=32, linear_num_value_heads=8,
    )  # fmt: skip
    folder = model_folder(path, tmp_path / "cache")
    assert not held(folder, "out_proj")
    agree(folder, ranks, answers(model))


def agree(folder: Path, ranks: RankPool, right: list[list[int]]) -> None:
    """On one rank and on two, which cut the columns."""
    chain = make_chain(folder, dtype="float32")
    assert MiniPlanner(chain).run(make_prompts(LENGTHS), GREEDY) == right
    ranks.make(folder, dtype="float32")
    assert MiniPlanner(ranks.execute).run(make_prompts(LENGTHS), GREEDY) == right


@pytest.mark.parametrize("wide", [(), ("attn_gate",)])
def test_a_tensor_of_a_folder_may_be_two_of_two_kinds(
    tmp_path: Path, wide: tuple[str, ...]
) -> None:
    path = tmp_path / "tiny.gguf"
    model = convert(
        path, "qwen3next", "qwen3-next", delta_rule_keys, delta_rule, Kind.Q8_0, wide,
        mlp_only_layers=[], shared_expert_intermediate_size=64, linear_value_head_dim=16,
    )  # fmt: skip
    folder = model_folder(path, tmp_path / "cache")
    assert held(folder, "in_proj_qkvz") == (not wide)
    chain = make_chain(folder, dtype="float32")
    assert MiniPlanner(chain).run(make_prompts(LENGTHS), GREEDY) == answers(model)


def test_gate_and_up_of_experts_may_be_one_tensor(tmp_path: Path) -> None:
    def whole(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
        if name.endswith("gate_up_proj"):
            yield f"blk.{name.split('.')[2]}.ffn_gate_up_exps.weight", tensor
        else:
            yield from delta_rule(name, tensor, config)

    path = tmp_path / "tiny.gguf"
    model = convert(path, "qwen35moe", "qwen3-5-moe", delta_rule_keys, whole)
    chain = make_chain(model_folder(path, tmp_path / "cache"))
    assert MiniPlanner(chain).run(make_prompts(LENGTHS), GREEDY) == answers(model)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    def keys(writer: gguf.GGUFWriter, config: Any) -> None:
        delta_rule_keys(writer, config)
        writer.add_block_count(config.num_hidden_layers + 1)
        writer.add_nextn_predict_layers(1)
        for name in ("nextn.eh_proj", "attn_q", "ffn_up"):
            writer.add_tensor(f"blk.3.{name}.weight", np.zeros((4, 64), np.float32))

    path = tmp_path / "tiny.gguf"
    model = convert(path, "qwen35", "qwen3-5", keys, delta_rule)
    chain = make_chain(model_folder(path, tmp_path / "cache"))
    assert MiniPlanner(chain).run(make_prompts(LENGTHS), GREEDY) == answers(model)


def test_layers_behind_the_last_are_refused_where_none_predict(tmp_path: Path) -> None:
    def keys(writer: gguf.GGUFWriter, config: Any) -> None:
        delta_rule_keys(writer, config)
        writer.add_tensor("blk.77.attn_q.weight", np.zeros((4, 64), np.float32))

    path = tmp_path / "tiny.gguf"
    convert(path, "qwen35", "qwen3-5", keys, delta_rule)
    with pytest.raises(ModelError, match=r"unexpected tensor blk\.77\.attn_q\.weight"):
        make_chain(model_folder(path, tmp_path / "cache"))


def test_fused_experts_of_another_height_are_refused(tmp_path: Path) -> None:
    def taller(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
        if name.endswith("gate_up_proj"):
            tensor = torch.cat([tensor, tensor[:, :2]], 1)
            yield f"blk.{name.split('.')[2]}.ffn_gate_up_exps.weight", tensor
        else:
            yield from delta_rule(name, tensor, config)

    path = tmp_path / "tiny.gguf"
    convert(path, "qwen35moe", "qwen3-5-moe", delta_rule_keys, taller)
    with pytest.raises(ModelError, match=r"ffn_gate_up_exps\.weight has shape"):
        make_chain(model_folder(path, tmp_path / "cache"))


def test_two_epsilons_that_differ_are_refused(tmp_path: Path) -> None:
    def keys(writer: gguf.GGUFWriter, config: Any) -> None:
        delta_rule_keys(writer, config)
        writer.add_layer_norm_eps(1e-3)

    path = tmp_path / "tiny.gguf"
    convert(path, "qwen35", "qwen3-5", keys, delta_rule)
    with pytest.raises(ModelError, match="layer_norm_rms_epsilon differ"):
        model_folder(path, tmp_path / "cache")
