"""Draws of captured steps: over shards as over whole logits, and what is queued for single rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from actors.stage.cuda.graph_draw import GraphDraw
from actors.stage.vocab_parallel import DRAW_FAILED
from actors.transport.group import RankGroup
from kernels.graph_support import GraphSupport
from kernels.random_stream import row_keys
from kernels.sampling import SamplingRows
from kernels.torch import sampling
from tests.actors.stage.rank_pool import free_port

# A rank that fails leaves the others waiting for it.
pytestmark = pytest.mark.timeout(60)

CPU = torch.device("cpu")
VOCABULARY, ROWS = 11, 6  # of the persistent batch


class GivenLogits:
    """A decoder whose head makes of `normed` what is given: a shard of whole logits."""

    def __init__(self, group: RankGroup) -> None:
        self.device, self.vocab_size = CPU, VOCABULARY
        self.shard_width = -(-VOCABULARY // group.size)
        self._group = group
        self._first_id = group.rank * self.shard_width

    def sharded_logits(self, whole_SV: torch.Tensor) -> torch.Tensor:
        num_padding = self.shard_width * self._group.size - VOCABULARY
        padded_SV = torch.nn.functional.pad(whole_SV, (0, num_padding))
        return padded_SV[:, self._first_id : self._first_id + self.shard_width]

    def local_logits(self, sharded_SV: torch.Tensor) -> tuple[torch.Tensor, int]:
        return sharded_SV[:, : max(0, VOCABULARY - self._first_id)], self._first_id

    def gather_logits(self, sharded_SV: torch.Tensor) -> torch.Tensor | None:
        whole_SV = self._group.gather_columns(sharded_SV)
        return None if whole_SV is None else whole_SV[:, :VOCABULARY].contiguous()

    def logits(self, whole_SV: torch.Tensor, place_SV: torch.Tensor) -> None:
        place_SV.copy_(whole_SV)


def pack(rows: SamplingRows) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Keys and temperatures; cuts are not drawn by `draw` below."""
    assert not rows.top_k_S.any()
    keys_S = row_keys(rows.seed_S, rows.position_S).view(np.float64)
    return np.stack((keys_S, rows.temperature_S.astype(np.float64), np.zeros(len(keys_S))), 1)


def draw(
    logits_SV: torch.Tensor, packed_S3: torch.Tensor, first_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference, from packed rows."""
    keys_S = packed_S3[:, 0].contiguous().view(torch.int64)
    keys_S2 = torch.stack((keys_S & 0xFFFFFFFF, (keys_S >> 32) & 0xFFFFFFFF), 1)
    temperature_S1 = packed_S3[:, 1:2]
    noise_SV = sampling.gumbel_noise(keys_S2, first_id, logits_SV.shape[1])
    warm_SV = logits_SV.double() * (1 / temperature_S1.float()).double() + noise_SV
    scores_SV = torch.where(temperature_S1 > 0, warm_SV, logits_SV.double())
    best_S, token_S = scores_SV.max(1)
    return best_S, token_S.int() + first_id


SUPPORT = GraphSupport(True, pack, draw, sampling.gather_logprobs, lambda experts: True)


def make_rows(num: int, top_k: int = 0) -> SamplingRows:
    return SamplingRows(
        temperature_S=np.array([0.0, 0.8, 1.3, 0.0][:num], np.float32),
        top_k_S=np.full(num, top_k, np.int32),
        top_p_S=np.ones(num, np.float32),
        min_p_S=np.zeros(num, np.float32),
        seed_S=np.arange(num),
        position_S=np.arange(num) + 5,
    )


@pytest.fixture(params=[1, 2, 5])
def draws(request: pytest.FixtureRequest) -> Iterator[list[GraphDraw]]:
    """All ranks' draws. The last of five ranks has a shard of padding only."""
    size, address = request.param, f"127.0.0.1:{free_port()}"
    with ThreadPoolExecutor(size) as threads:
        groups = list(threads.map(lambda r: RankGroup(r, size, address), range(size)))
    decoders: list[Any] = [GivenLogits(group) for group in groups]
    yield [GraphDraw(d, g, SUPPORT, 4, ROWS) for d, g in zip(decoders, groups, strict=True)]
    for group in groups:
        group.close()


def together(draws: list[GraphDraw], work: Callable[[int, GraphDraw], Any]) -> list[Any]:
    """What each rank says, all at once."""
    with ThreadPoolExecutor(len(draws)) as threads:
        return list(threads.map(work, range(len(draws)), draws))


def run(draws: list[GraphDraw], logits_SV: torch.Tensor) -> list[list[int]]:
    """The graph's draw on each rank: slices 0 to 2 of rows 4, 1, 3."""
    rows = make_rows(len(logits_SV), top_k=3 if len(draws) > 1 else 0)
    batch_rows_S = torch.tensor([4, 1, 3], dtype=torch.int32)

    def work(rank: int, one: GraphDraw) -> list[int]:
        packed_S3 = torch.from_numpy(one.pack(rows))
        return one.draw(logits_SV, packed_S3, batch_rows_S)[1].tolist()

    return together(draws, work)


LOGITS = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(5))


def test_every_rank_has_the_token_of_whole_logits(draws: list[GraphDraw]) -> None:
    wanted = sampling.sample(LOGITS, make_rows(3)).tolist()
    assert run(draws, LOGITS) == [wanted] * len(draws)
    tokens_T = torch.tensor([7, -1 - 1, -1 - 4, 9], dtype=torch.int32)
    for one in draws:
        assert one.known(tokens_T).tolist() == [7, wanted[1], wanted[0], 9]
        assert one.fetch_tokens(2).wait().tolist() == wanted[:2]


def test_equal_logits_have_the_lowest_id(draws: list[GraphDraw]) -> None:
    logits_SV = torch.zeros(3, VOCABULARY)
    assert [tokens[0] for tokens in run(draws, logits_SV)] == [0] * len(draws)


@pytest.mark.parametrize("column", [0, VOCABULARY - 1])
def test_an_overflow_is_told_by_its_row(draws: list[GraphDraw], column: int) -> None:
    logits_SV = LOGITS.clone()
    logits_SV[1, column] = torch.inf
    wanted = sampling.sample(LOGITS, make_rows(3)).tolist()
    wanted[1] = -1
    assert run(draws, logits_SV) == [wanted] * len(draws)
    for one in draws:  # the next step reads ids
        assert one.known(torch.tensor([-1 - 1], dtype=torch.int32)).tolist() == [0]


def test_rank_0_draws_again_for_all(draws: list[GraphDraw]) -> None:
    wanted = run(draws, LOGITS)[0]
    slices, rows = np.array([2, 0]), np.array([3, 4])

    def again(rank: int, one: GraphDraw) -> tuple[torch.Tensor, ...]:
        logits_RV = one.whole_logits(slices)
        assert (logits_RV is None) == (rank > 0)
        tokens_R, logprobs = None, ()
        if logits_RV is not None:
            assert torch.equal(logits_RV, LOGITS[[2, 0]])
            kept_RV = one.pick(logits_RV, np.array([1]))
            tokens_R = torch.tensor([8, 6], dtype=torch.int32)
            one.put(slices, rows, tokens_R)
            logprobs = one.gather_logprobs(np.array([0]), kept_RV, 2)
        else:
            one.put(slices, rows, None)
        return logprobs

    logprobs = together(draws, again)
    chosen_R = torch.log_softmax(LOGITS[0], 0)[6]
    assert logprobs[0][0].tolist() == pytest.approx([float(chosen_R)])
    for one in draws:
        assert one.fetch_tokens(3).wait().tolist() == [6, wanted[1], 8]
        assert one.known(torch.tensor([-1 - 4, -1 - 3])).tolist() == [6, 8]


def test_a_failure_of_rank_0_reaches_all(draws: list[GraphDraw]) -> None:
    wanted = run(draws, LOGITS)[0]

    def fail(rank: int, one: GraphDraw) -> None:
        one.put(np.array([1]), np.array([1]), None)

    together(draws, fail)
    for one in draws:
        assert one.fetch_tokens(3).wait().tolist() == [wanted[0], DRAW_FAILED, wanted[2]]
        assert one.known(torch.tensor([-1 - 1], dtype=torch.int32)).tolist() == [0]
