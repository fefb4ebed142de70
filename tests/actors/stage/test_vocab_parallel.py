"""The winner over vocabulary shards, as every rank finds it."""

from __future__ import annotations

import math

import pytest
import torch

from actors.stage.vocab_parallel import NO_SCORE, winners
from actors.transport.group import RankGroup


class Gathered(RankGroup):
    """One rank of several; what the others send is known."""

    def __init__(self, others: list[torch.Tensor]) -> None:
        super().__init__()
        self._others = others

    def gather_all(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x, *self._others])


def won(*shards: tuple[float, int]) -> int:
    """The token of one draw, given each rank's (score, token)."""
    mine, *others = [torch.tensor([shard], dtype=torch.float64) for shard in shards]
    group = Gathered([_marked(other) for other in others])
    token_S = winners(group, mine[:, 0], mine[:, 1].int())
    assert token_S.dtype == torch.int32
    return int(token_S[0])


def _marked(best_12: torch.Tensor) -> torch.Tensor:
    """As `winners` sends it."""
    sent: list[torch.Tensor] = []

    class Sends(RankGroup):
        def gather_all(self, x: torch.Tensor) -> torch.Tensor:
            sent.append(x)
            return x[None]

    winners(Sends(), best_12[:, 0], best_12[:, 1].int())
    return sent[0]


def test_the_highest_score_wins_and_the_lower_rank_among_equals() -> None:
    assert won((1.0, 3), (2.0, 130_000)) == 130_000
    assert won((2.0, 3), (1.0, 9)) == 3
    assert won((2.0, 3), (2.0, 9), (2.0, 12)) == 3
    assert won((-7.0, 3), (NO_SCORE, 0)) == 3


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_shard_that_is_not_finite_cannot_lose(score: float, rank: int) -> None:
    shards = [(5.0, 1), (6.0, 50), (4.0, 90)]
    shards[rank] = (score, shards[rank][1])
    assert won(*shards) == -1
