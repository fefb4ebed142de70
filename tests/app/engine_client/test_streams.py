"""Between the scheduler's outputs and the readers: nothing overtaken, doubled or lost."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from actors.scheduling.events import Output
from actors.scheduling.request import (
    ALLOWS_NOTHING,
    TAKES_TOO_LONG,
    FinishReason,
    Request,
    SamplingParams,
)
from app.engine_client.client import (
    EngineUnavailable,
    GenerationFailed,
    GenerationRequest,
    RequestRefused,
    TokenChunk,
)
from app.engine_client.streams import OpenRequest, OpenRequests, Stream, core_requests


class Taking:
    """A sink that takes everything, or raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.taken: list[int] = []
        self.error = error

    def write(self, index: int, tokens: Sequence[int]) -> bool:
        if self.error is not None:
            raise self.error
        self.taken += tokens
        return True


def _open(sink: Taking) -> tuple[OpenRequests, Stream]:
    stream = Stream(sink)
    stream.num_open = 1
    request = Request(1, (5,), SamplingParams(100), 0.0)
    return OpenRequests({1: OpenRequest(request, 0, stream)}), stream


async def test_only_a_waiting_reader_is_passed() -> None:
    sink = Taking()
    requests, stream = _open(sink)
    requests.deliver([(1, 0, 10)])  # nothing reads yet
    assert sink.taken == []
    assert [chunk.tokens for chunk in await stream.get()] == [[10]]
    reader = asyncio.create_task(stream.get())
    await asyncio.sleep(0)
    requests.deliver([(1, 1, 11)])
    assert sink.taken == [11]
    stream.put(TokenChunk(0, 2, [12]))
    requests[1].delivered.append(12)
    requests.deliver([(1, 3, 13)])  # the reader has 12 still to take
    assert [chunk.tokens for chunk in await reader] == [[12, 13]]
    requests.deliver([(1, 4, 14)])  # and is busy with it
    assert sink.taken == [11]
    assert requests[1].delivered == [10, 11, 12, 13, 14]


async def test_a_token_that_was_delivered_before_is_dropped() -> None:
    sink = Taking()
    requests, stream = _open(sink)
    reader = asyncio.create_task(stream.get())
    await asyncio.sleep(0)
    requests.deliver([(1, 0, 10), (1, 0, 10), (1, 1, 11), (2, 0, 99)])
    assert sink.taken == [10, 11]
    reader.cancel()


async def test_the_reader_gets_what_the_sink_raises() -> None:
    requests, stream = _open(Taking(RuntimeError("torn")))
    reader = asyncio.create_task(stream.get())
    await asyncio.sleep(0)
    requests.deliver([(1, 0, 10)])
    with pytest.raises(RuntimeError, match="torn"):
        await reader


async def test_a_slow_reader_gets_one_chunk_of_all_it_missed() -> None:
    requests, stream = _open(Taking())
    requests.deliver([(1, 0, 10)])
    requests.deliver([(1, 1, 11), Output(1, 2, (12,), FinishReason.LENGTH)])
    (chunk,) = await stream.get()
    assert (chunk.first, chunk.tokens, chunk.num_steps) == (0, [10, 11, 12], 3)
    assert chunk.finish_reason is FinishReason.LENGTH
    assert not requests
    assert await stream.get() == []


async def test_accepted_drafts_are_of_one_step() -> None:
    requests, stream = _open(Taking())
    requests.deliver([tuple(Output(1, 0, (10, 11, 12)))])
    (chunk,) = await stream.get()
    assert (chunk.tokens, chunk.num_steps) == ([10, 11, 12], 1)


async def test_a_replay_starts_behind_what_was_delivered() -> None:
    requests, _ = _open(Taking())
    requests.deliver([(1, 0, 10), (1, 1, 11)])
    again = requests[1].resumed()
    assert again.output == (10, 11)
    assert again.prompt == (5,)


@pytest.mark.parametrize("error", [ALLOWS_NOTHING, TAKES_TOO_LONG])
async def test_a_grammar_s_error_is_its_request_s_fault_after_its_tokens(error: str) -> None:
    requests, stream = _open(Taking())
    requests.deliver([Output(1, 0, (10,), FinishReason.ERROR, error=error)])
    assert [chunk.tokens for chunk in await stream.get()] == [[10]]
    with pytest.raises(RequestRefused, match="response_format"):
        await stream.get()
    assert not requests


async def test_an_error_reaches_its_own_reader_alone() -> None:
    requests, stream = _open(Taking())
    other = Stream()
    other.num_open = 1
    requests[2] = OpenRequest(Request(2, (5,), SamplingParams(9), 0.0), 0, other)
    requests.deliver([Output(1, 0, (), FinishReason.ERROR, error="broken")])
    with pytest.raises(GenerationFailed, match="broken"):
        await stream.get()
    assert list(requests) == [2]
    requests.fail_all(EngineUnavailable("gone"))
    with pytest.raises(EngineUnavailable, match="gone"):
        await other.get()
    assert not requests


def _opened(*request_ids: int) -> tuple[OpenRequests, dict[int, Stream]]:
    streams = {number: Stream() for number in request_ids}
    made = {n: Request(n, (5,), SamplingParams(9), 0.0) for n in request_ids}
    return OpenRequests({n: OpenRequest(made[n], 0, streams[n]) for n in request_ids}), streams


def test_a_lost_engine_is_held_against_what_it_computed() -> None:
    requests, _ = _opened(1, 2, 3)
    requests.started([1, 2, 77])
    requests.engine_lost()
    assert [requests[n].resumed().num_losses for n in (1, 2, 3)] == [1, 1, 0]
    requests.suspected([(1, 2), (2, 1)], (1,))
    requests.engine_lost()
    assert 1 not in requests  # the third loss, and no other was computed
    assert [requests[n].resumed().num_losses for n in (2, 3)] == [1, 0]
    requests.suspected([], ())  # it has proved harmless
    assert requests[2].resumed().num_losses == 0


def test_an_engine_that_ends_without_its_stages_is_no_further_loss() -> None:
    requests, _ = _opened(1, 2)
    requests.started([1, 2])
    requests.suspected([(1, 1)], (), stages_are_lost=True)
    requests.engine_lost()
    assert [requests[n].num_losses for n in (1, 2)] == [1, 0]
    requests.engine_lost()  # the next one, which has computed both
    assert [requests[n].num_losses for n in (1, 2)] == [2, 1]
    requests.suspected([(1, 3)], (), stages_are_lost=True)
    requests.suspected([(1, 3)], ())  # they are rebuilt
    requests.engine_lost()
    assert [requests[n].num_losses for n in (1, 2)] == [4, 1]


async def test_a_request_that_cost_three_engines_is_told_so() -> None:
    requests, streams = _opened(1)
    streams[1].num_open = 1
    requests.suspected([(1, 2)], (1,))
    requests.engine_lost()
    with pytest.raises(GenerationFailed, match="whenever this request runs"):
        await streams[1].get()


def test_continuations_of_equal_ids_are_of_different_groups() -> None:
    """A client may choose the id, as may another's: neither is to wait for the other's prompt."""
    asked = GenerationRequest("trace-1", (5, 6), SamplingParams(4), n=2)
    first, second = (core_requests(asked, itertools.count(), 0.0) for _ in range(2))
    assert first[0].group == first[1].group != second[0].group == second[1].group
    (alone,) = core_requests(replace(asked, n=1), itertools.count(), 0.0)
    assert alone.group is None
