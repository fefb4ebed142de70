"""What config.json files of Granite 4 say: its MLPs, its positions, its layers of Mamba-2."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.stage.models.config import Mamba2, ModelError
from tests.actors.stage.models.published_mixtures import described

NAME = "Granite-4.0-1B"


def test_without_experts_the_shared_one_is_the_mlp(tmp_path: Path) -> None:
    found = described(tmp_path, NAME)
    assert not any(found.has_experts(layer) for layer in range(4))
    assert (found.inner_size, found.names.down) == (80, "shared_mlp.output_linear")
    mixed = described(tmp_path, NAME, num_local_experts=4, num_experts_per_tok=2)
    assert all(mixed.has_experts(layer) for layer in range(4))
    assert (mixed.expert_size, mixed.shared_expert_size) == (96, 80)


@pytest.mark.parametrize(("kind", "dim"), [("rope", 16), ("nope", 0), (None, 0)])
def test_positions_are_rotated_where_it_says_so(tmp_path: Path, kind: str | None, dim: int) -> None:
    found = described(tmp_path, NAME, position_embedding_type=kind)
    assert {rope.dim for rope in found.ropes} == {dim}


def test_which_layers_are_mamba(tmp_path: Path) -> None:
    assert described(tmp_path, NAME).mixer is None
    found = described(tmp_path, "Granite-4.0-H-Tiny")
    assert found.mixer_layers == (True, True, False, True)
    assert described(tmp_path, "Granite-4.0-H-Tiny", layer_types=None).mixer_layers == (True,) * 4
    with pytest.raises(ModelError, match="must be linear_attention or mamba or full_attention"):
        described(tmp_path, NAME, layer_types=["mamba2"] + ["attention"] * 3)


def test_the_norm_of_results_does_not_count_in_units_of_the_residual(tmp_path: Path) -> None:
    found = described(tmp_path, "Granite-4.0-H-Tiny")
    assert isinstance(found.mixer, Mamba2)
    assert found.norm_eps == pytest.approx(found.mixer.norm_eps / 0.22**2)
