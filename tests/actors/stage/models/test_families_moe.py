"""What config.json files of mixtures say: which layers have experts, how much is rotated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors.stage.models.config import ModelError
from tests.actors.stage.models.published_mixtures import described


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
