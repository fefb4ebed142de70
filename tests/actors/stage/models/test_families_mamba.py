"""What config.json files say of Mamba-2, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from actors.stage.models.config import Mamba2, ModelError, Multipliers
from actors.stage.models.split import split
from actors.stage.spec import StageSpec
from tests.actors.stage.models.published_mixtures import described

GRANITE = "Granite-4.0-H-Tiny"
FALCON = "Falcon-H1-0.5B"
NEMOTRON_H, NEMOTRON_3 = "Nemotron-H-8B", "Nemotron-3-Nano-30B-A3B"
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


def test_a_layer_of_nemotron_has_the_mlp_that_follows_it(tmp_path: Path) -> None:
    found = described(tmp_path, NEMOTRON_H)
    assert found.stored_at == ((0, 1), (2, None), (3, 4), (5, None))
    assert found.mixer_layers == (True, True, False, True)
    assert [found.has_mlp(layer) for layer in range(4)] == [True, False, True, False]
    assert (found.num_layers, found.head_dim, {rope.dim for rope in found.ropes}) == (4, 16, {0})
    assert found.mixer == Mamba2(**SIZES | {"num_groups": 2})
    kinds = ["mamba", "mlp", "linear_attention", "full_attention", "mlp", "mamba"]
    for key in ("layers_block_type", "layer_types"):
        assert (
            described(tmp_path, NEMOTRON_H, **{key: kinds}, hybrid_override_pattern=None) == found
        )


def test_experts_of_nemotron(tmp_path: Path) -> None:
    found = described(tmp_path, NEMOTRON_3)
    assert found.stored_at == ((0, 1), (2, None), (3, 4), (5, 6))
    assert found.expert_layers == (True, False, True, True)
    assert (found.num_experts, found.expert_size, found.shared_expert_size) == (8, 32, 48)
    assert (found.names.gated, found.activation, found.routing.scale) == (False, "relu2", 2.5)


def test_bamba(tmp_path: Path) -> None:
    found = described(tmp_path, "Bamba-9B")
    assert found.mixer_layers == (True, True, False, True)
    assert {rope.dim for rope in found.ropes} == {8}


def test_multipliers_of_falcon(tmp_path: Path) -> None:
    found = described(tmp_path, FALCON, attention_in_multiplier=2.0)
    assert (found.mixer_beside, found.has_mixer(0)) == (True, False)
    assert isinstance(found.mixer, Mamba2)
    assert (found.mixer.value_size, found.mixer.normed) == (96, False)
    assert found.attention_scale == 16**-0.5 * 4 * 0.390625
    assert found.multipliers == Multipliers(
        attention=1.875,
        mixer=0.23570226039551587,
        mixer_inputs=(1.25 * 0.5, 1.25 * 0.36, 1.25 * 0.25, 1.25 * 0.35, 1.25 * 0.37),
        gate=0.8838834764831844,
        mlp=0.5859375,
    )


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        (NEMOTRON_H, {"hybrid_override_pattern": "-M"}, "layer 0, of mlp, does not follow Mamba"),
        (NEMOTRON_H, {"hybrid_override_pattern": "M--"}, "layer 2, of mlp, does not follow Mamba"),
        (NEMOTRON_H, {"hybrid_override_pattern": "*-"}, "a model without layers of Mamba"),
        (NEMOTRON_H, {"hybrid_override_pattern": "MX"}, "a layer of 'X' is not supported"),
        (NEMOTRON_H, {"attention_bias": True}, "attention_bias True is not supported"),
        (NEMOTRON_3, {"moe_latent_size": 32}, "moe_latent_size 32 is not supported"),
        (NEMOTRON_3, {"mlp_bias": True}, "mlp_bias True is not supported"),
        (NEMOTRON_3, {"n_shared_experts": 2}, "n_shared_experts 2 is not supported"),
        (NEMOTRON_3, {"n_group": 3}, "n_group 3, topk_group 1 do not fit 8 experts"),
        ("Bamba-9B", {"attn_rotary_emb": 16}, "attn_rotary_emb 16 is not supported"),
        (FALCON, {"projectors_bias": True}, "projectors_bias True is not supported"),
        (
            FALCON,
            {"mamba_rms_norm": True, "mamba_norm_before_gate": True},
            "mamba_norm_before_gate True is not supported with mamba_rms_norm",
        ),
    ],
)
def test_what_other_families_refuse(
    tmp_path: Path, name: str, changed: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        described(tmp_path, name, **changed)


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
