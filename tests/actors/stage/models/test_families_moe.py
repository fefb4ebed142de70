"""What config.json files of mixtures say, and which combinations are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actors.stage.models.config import DecoderConfig, ModelError
from actors.stage.models.read import load_config
from kernels.layer_form import Routing
from tests.actors.stage.models.published_mixtures import MIXTURES


def described(folder: Path, name: str, **changed: Any) -> DecoderConfig:
    architecture, keys = MIXTURES[name]
    config = keys | {"architectures": [architecture]} | changed
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return load_config(folder)


def test_glm_4_5(tmp_path: Path) -> None:
    found = described(tmp_path, "GLM-4.5")
    assert found.expert_layers == (False, True, True, True)
    assert (found.num_experts, found.expert_size, found.shared_expert_size) == (8, 32, 32)
    assert found.routing == Routing("sigmoid", least_sum=1e-20, scale=2.5)
    assert found.names.stored_prefixes == (("model.layers.4.", None),)
    assert (found.qk_norm, found.ropes[0].dim, found.ropes[0].interleaved) == ("head", 8, False)


def test_minimax_m2_rotates_as_many_features_as_it_says(tmp_path: Path) -> None:
    assert described(tmp_path, "MiniMax-M2").ropes[0].dim == 8
    part = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    assert described(tmp_path, "MiniMax-M2", rope_parameters=part).ropes[0].dim == 4
    with pytest.raises(ModelError, match="attn_type_list: only"):
        described(tmp_path, "MiniMax-M2", attn_type_list=[1, 0, 1, 1])


@pytest.mark.parametrize(
    ("changed", "layers"),
    [
        ({}, [1, 2, 3]),
        ({"moe_layer_end_index": 2}, [1, 2]),
        ({"moe_layer_end_index": -1, "moe_layer_start_index": 2}, [2, 3]),
        ({"moe_layer_interval": 2, "moe_layer_start_index": 0}, [1, 3]),
    ],
)
def test_layers_of_ernie_with_experts(
    tmp_path: Path, changed: dict[str, Any], layers: list[int]
) -> None:
    found = described(tmp_path, "ERNIE-4.5-21B-A3B", **changed)
    assert [layer for layer in range(4) if found.has_experts(layer)] == layers


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"n_group": 3}, "n_group 3, topk_group 1 do not fit 8 experts"),
        ({"n_group": 8}, "n_group 8, topk_group 1 do not fit 8 experts"),
        ({"topk_group": 2}, "n_group 1, topk_group 2 do not fit 8 experts"),
        ({"n_group": 4, "num_experts_per_tok": 3}, "num_experts_per_tok 3 is more than the"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ({"topk_method": "greedy"}, "topk_method 'greedy' is not supported"),
    ],
)
def test_routing_that_is_not_known_is_refused(
    tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        described(tmp_path, "GLM-4.5", **changed)
