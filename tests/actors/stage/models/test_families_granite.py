"""What config.json files of Granite 4 say: its MLPs, its positions, and that Mamba is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.stage.models.config import ModelError
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


@pytest.mark.parametrize("kinds", [None, ["mamba"] + ["attention"] * 3])
def test_layers_of_mamba_are_refused(tmp_path: Path, kinds: list[str] | None) -> None:
    with pytest.raises(ModelError, match="layer_types 'mamba' is not supported"):
        described(tmp_path, NAME, layer_types=kinds)
