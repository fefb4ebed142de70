"""Which rows of a layer's projections a rank reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from actors.stage.models.config import DecoderConfig
from actors.stage.models.read import load_config
from actors.stage.models.split import split
from actors.stage.spec import StageSpec
from actors.stage.weights.mixer_names import mixer_linear_shapes
from actors.stage.weights.mixers import mixer_pieces
from actors.stage.weights.names import Piece


def rows(piece: Piece) -> list[int]:
    begin, end = piece.rows
    if piece.order is None:
        return list(range(begin, end))
    return [begin + i for i in piece.order.tolist()]


def read_by(config: DecoderConfig, num_ranks: int) -> list[list[tuple[str, int]]]:
    """Of each rank, in order: names and rows."""
    specs = [StageSpec("here", rank=r, tensor_ranks=num_ranks) for r in range(num_ranks)]
    return [
        [(p.name, row) for p in mixer_pieces(config, split(config, spec)) for row in rows(p)]
        for spec in specs
    ]


def test_ranks_read_every_row_once(tiny_model: Callable[..., Path]) -> None:
    for variant in ("qwen3-next", "qwen3-5", "lfm2", "granite-4-dense"):
        config = load_config(tiny_model(variant))
        names = config.names.mixer
        wanted = {names.inputs, names.z or names.inputs}
        shapes = mixer_linear_shapes(config)
        all_rows = sorted((name, row) for name in wanted for row in range(shapes[name][0][0]))
        for num_ranks in (1, 2):
            found = read_by(config, num_ranks)
            assert sorted(row for rank in found for row in rank) == all_rows


def test_heads_stored_in_groups_come_apart(tiny_model: Callable[..., Path]) -> None:
    """Of each key head: 8 rows of its query, 8 of its key, 24 of two values, 24 of their gates."""
    config = load_config(tiny_model("qwen3-next"))
    [found] = read_by(config, 1)
    numbers = torch.tensor([row for _, row in found])
    queries, keys, values, gates = torch.split(numbers, [16, 16, 48, 48])
    for part, start, size in ((queries, 0, 8), (keys, 8, 8), (values, 16, 24), (gates, 40, 24)):
        assert part.tolist() == [64 * g + start + i for g in range(2) for i in range(size)]


def test_ranks_share_a_group_of_mamba(tiny_model: Callable[..., Path]) -> None:
    """Of 128 gates, 128 values, 12 keys, 12 queries and 4 steps."""
    first, second = (
        [row for _, row in rank] for rank in read_by(load_config(tiny_model("granite-4")), 2)
    )
    group = [*range(268, 280), *range(256, 268)]
    assert first == [*group, *range(128, 192), *range(64), 280, 281]
    assert second == [*group, *range(192, 256), *range(64, 128), 282, 283]
