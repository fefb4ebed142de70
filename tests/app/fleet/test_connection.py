"""What a front's stream takes with it when it changes engines."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from actors.scheduling.events import Output, Refuse
from actors.scheduling.request import FinishReason, Request, SamplingParams
from actors.transport.messages import Welcome, pack_kind
from app.engine_client.streams import Stream
from app.fleet.connection import Connection, FleetRequest
from app.fleet.registry import EngineEntry
from tests.app.telemetry.test_fleet import step


def engine(name: str) -> Any:
    return SimpleNamespace(engine_id=name, snapshot=None)


def test_what_an_engine_has_accepted_is_judged_by_no_limit_of_the_next() -> None:
    waiting = FleetRequest(Request(1, (5, 6), SamplingParams(9), 0.0), 0, Stream())
    waiting.place(engine("refuses"))
    waiting.refused_by["refuses"] = Refuse(1, "the queue is full", None, 1.0)
    waiting.place(engine("accepts"))
    assert not waiting.resumed().was_accepted  # no engine has taken it so far
    waiting.unplace(0.0)  # that engine dies before the first token
    waiting.place(engine("full"))
    assert waiting.resumed().was_accepted
    waiting.refused_by["full"] = Refuse(1, "the prompt is too long")
    waiting.place(engine("last"))
    assert waiting.resumed().was_accepted


def test_what_an_engine_has_begun_waits_at_no_other() -> None:
    """It may be refused nowhere for a wait that has ended."""
    waiting = FleetRequest(Request(1, (5, 6), SamplingParams(9), 0.0), 0, Stream())
    waiting.place(engine("first"))
    waiting.place(engine("second"))
    assert not waiting.resumed().has_started
    waiting.has_started = True
    for name in ("third", "fourth"):
        waiting.place(engine(name))
        assert waiting.resumed().has_started


@pytest.mark.parametrize("has_tokens", [False, True])
def test_log_probabilities_of_a_prompt_are_computed_until_they_have_come(has_tokens: bool) -> None:
    moving = FleetRequest(
        Request(1, (5, 6), SamplingParams(9, prompt_logprobs=2), 0.0), 0, Stream()
    )
    moving.place(engine("first"))
    if has_tokens:
        moving.deliver(Output(1, 0, (7,)))
    moving.place(engine("second"))
    assert moving.resumed().sampling.prompt_logprobs == (None if has_tokens else 2)


def test_a_stream_that_has_run_for_long_has_not_waited_for_long() -> None:
    running = FleetRequest(Request(1, (5, 6), SamplingParams(9), 0.0), 0, Stream())
    running.place(engine("first"))
    running.deliver(Output(1, 0, (7,)))
    running.placed_s = 0.0
    running.unplace(1000.0)
    assert running.waiting_since_s == 1000.0


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP])
def test_what_ends_with_its_first_token_is_not_handed_over(reason: FinishReason) -> None:
    """Where an engine only begins it, a length of one token is the end of the engine's part."""
    handed_over = list[FleetRequest]()
    begun = FleetRequest(Request(1, (5, 6), SamplingParams(9), 0.0), 0, Stream())
    begun.hand_over = handed_over.append
    begun.place(engine("begins"))
    assert begun.resumed().sampling.max_tokens == 1
    begun.deliver(Output(1, 0, (7,), reason))
    is_part = reason is FinishReason.LENGTH
    assert handed_over == [begun] * is_part
    (chunk,) = begun.stream._pending.values()
    assert (chunk.tokens, chunk.finish_reason) == ([7], None if is_part else reason)


def test_an_engine_that_says_nothing_behind_its_welcome_is_silent() -> None:
    """As one whose node vanishes then: no socket tells of it."""
    unused: Any = object()
    connection = Connection(EngineEntry("e", "node", "@", None, b"", 1), "node", unused)
    now_s, period_s = time.monotonic(), 0.5
    now_s += 60.0  # its front stood still as it connected
    assert connection.silent_s(now_s, period_s) <= 2 * period_s
    for look in range(1, 11):
        silent_s = connection.silent_s(now_s + look * period_s, period_s)
    assert 5.0 <= silent_s <= 6.0


@pytest.mark.parametrize(("node", "offset_s"), [("here", 0.0), ("there", 5000.0)])
async def test_only_engines_of_other_nodes_have_other_clocks(node: str, offset_s: float) -> None:
    """A welcome of the same node may be read late, or be sent late."""
    unused: Any = object()
    entry = EngineEntry("e", node, "@local", "127.0.0.1:1", b"", 1)
    connection = Connection(entry, "here", unused)
    connection._welcomed = asyncio.get_running_loop().create_future()
    welcome = Welcome(1, time.monotonic() + 5000.0, 11, (2,), 100)
    connection._received(pack_kind(welcome))
    assert connection.offset_s == pytest.approx(offset_s, abs=60.0 if offset_s else 0.0)


async def test_a_welcome_of_another_node_that_was_read_late_puts_no_step_in_the_future() -> None:
    unused: Any = object()
    connection = Connection(EngineEntry("e", "there", "@", "127.0.0.1:1", b"", 1), "here", unused)
    connection._welcomed = asyncio.get_running_loop().create_future()
    ahead_s, late_s = 5000.0, 400.0
    welcome = Welcome(1, time.monotonic() + ahead_s - late_s, 11, (2,), 100)
    connection._received(pack_kind(welcome))
    for ago_s in (0.0, 200.0):
        now_s = time.monotonic()
        record = step(1, now_s + ahead_s - ago_s - 0.1, now_s + ahead_s - ago_s)
        (shown,) = connection.shifted([tuple(record)])
        assert shown.done_s == pytest.approx(now_s - ago_s, abs=60.0)
        assert shown.stages_s[0][1] == shown.done_s
    assert connection.offset_s == pytest.approx(ahead_s, abs=60.0)
