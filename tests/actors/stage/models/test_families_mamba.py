"""What config.json files say of Mamba-2, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from actors.stage.models.config import Mamba2, ModelError
from actors.stage.models.split import split
from actors.stage.spec import StageSpec
from tests.actors.stage.models.published_mixtures import described

GRANITE = "Granite-4.0-H-Tiny"
SIZES: dict[str, Any] = {
    "taps": 4, "num_groups": 1, "num_heads": 4, "state_dim": 16, "head_dim": 32, "norm_eps": 1e-5,
}  # fmt: skip


def test_sizes(tmp_path: Path) -> None:
    for head_dim in (32, "auto"):
        found = described(tmp_path, GRANITE, mamba_d_head=head_dim, rms_norm_eps=1e-5).mixer
        assert found == Mamba2(**SIZES, step_limits=(0.0, math.inf))


@pytest.mark.parametrize("most", [math.inf, {"__float__": "Infinity"}])
def test_limits_of_steps(tmp_path: Path, most: object) -> None:
    found = described(tmp_path, GRANITE, time_step_limit=[0.01, most], rms_norm_eps=1e-5).mixer
    assert found == Mamba2(**SIZES, step_limits=(0.01, math.inf))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"mamba_n_groups": 3}, "4 heads of Mamba-2 are no multiple of 3 groups"),
        ({"mamba_d_head": 16}, "mamba_n_heads 4 of 16 features are not 128"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"time_step_limit": [1.0, 0.1]}, "is no range"),
        ({"layer_types": ["mamba"]}, "kinds of layers must be"),
    ],
)
def test_what_is_refused(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        described(tmp_path, GRANITE, **changed)


def test_groups_that_ranks_cannot_share(tmp_path: Path) -> None:
    keys = {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 96}
    found = described(tmp_path, GRANITE, mamba_n_groups=2, **keys)
    with pytest.raises(ModelError, match="2 groups of Mamba-2's heads cannot be split over 4"):
        split(found, StageSpec(str(tmp_path), tensor_ranks=4))
