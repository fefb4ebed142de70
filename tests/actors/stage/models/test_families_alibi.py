"""BLOOM and MPT as their published folders have them: names, keys, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from actors.stage.models.config import ModelError
from actors.stage.models.read import load_config
from tests.actors.stage.greedy_reference import GREEDY, expected, make_prompts
from tests.actors.stage.mini_planner import MiniPlanner, make_chain

Edit = Callable[[dict[str, Any]], None]


def edited(folder: Path, target: Path, edit: Edit) -> Path:
    """A copy of a model folder with another config.json."""
    shutil.copytree(folder, target)
    path = target / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))
    return target


def test_mpt_by_its_authors_name(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    def rename(config: dict[str, Any]) -> None:
        config["architectures"] = ["MPTForCausalLM"]

    folder = edited(tiny_model("mpt"), tmp_path / "mpt", rename)
    assert MiniPlanner(make_chain(folder)).run(make_prompts(), GREEDY) == expected("mpt")


def test_bloom_as_it_was_published(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Sizes by other names, tensors without a prefix."""

    def rename(config: dict[str, Any]) -> None:
        config["n_embed"] = config.pop("hidden_size")
        config["num_attention_heads"] = config.pop("n_head")
        config["seq_length"] = config.pop("max_position_embeddings")

    folder = edited(tiny_model("bloom"), tmp_path / "bloom", rename)
    path = folder / "model.safetensors"
    tensors = {name.removeprefix("transformer."): x for name, x in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    assert load_config(folder).max_model_len == 256
    assert MiniPlanner(make_chain(folder)).run(make_prompts(), GREEDY) == expected("bloom")


@pytest.mark.parametrize(
    ("variant", "changed", "message"),
    [
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual"),
        ("mpt", {"no_bias": False}, "no_bias False is not supported"),
        ("mpt", {"logit_scale": "inv_sqrt_d_model"}, "logit_scale"),
        ("mpt", {"attn_config": {"clip_qkv": 6}}, "clip_qkv 6 is not supported"),
        ("mpt", {"attn_config": {"alibi": False}}, "alibi False is not supported"),
        ("mpt", {"attn_config": {"qk_ln": True}}, "qk_ln True is not supported"),
        ("mpt", {"attn_config": {"attn_type": "multiquery_attention"}}, "attn_type"),
    ],
)
def test_what_is_refused(
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    variant: str,
    changed: dict[str, Any],
    message: str,
) -> None:
    folder = edited(tiny_model(variant), tmp_path / "model", lambda config: config.update(changed))
    with pytest.raises(ModelError, match=message):
        load_config(folder)


def test_the_largest_exponent_of_mpt_is_read(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    def double(config: dict[str, Any]) -> None:
        config["attn_config"]["alibi_bias_max"] = 16

    alibi = load_config(edited(tiny_model("mpt"), tmp_path / "mpt", double)).alibi
    assert alibi is not None
    assert alibi.slopes == (1 / 16, 1 / 256, 1 / 4096, 1 / 65536)
