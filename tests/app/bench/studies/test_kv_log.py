"""Streams followed from one engine's log to another's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.event_log import Row, config_row, to_row
from actors.scheduling.events import (
    Emit,
    Execute,
    Fetch,
    FetchEarly,
    Instruction,
    Moved,
    Save,
    StepDone,
    Submit,
)
from actors.scheduling.plan import StepPlan, StepResult
from actors.scheduling.request import Request, SamplingParams
from actors.scheduling.state import prefix_digests
from app.bench.report import MeasurementError
from app.bench.studies.kv_log import Move, bytes_per_s, continued, measured_link, read_engine

CONFIG = SchedulerConfig(num_blocks=64, block_size=4)
PROMPT = tuple(range(12))
BLOCK_BYTES = 1000.0


def step(step_id: int, request_id: int) -> Execute:
    return Execute(StepPlan(step_id, ((request_id, 0, 1, True),)))


def rows(*calls: tuple[float, object, list[Instruction]]) -> list[Row]:
    return [config_row(CONFIG), *(to_row(at_s, event, out) for at_s, event, out in calls)]  # type: ignore[arg-type]


def first_engine() -> list[Row]:
    request = Request(7, PROMPT, SamplingParams(1), 1.0)
    blocks = tuple((number, d) for number, d in enumerate(prefix_digests(PROMPT, 4)))
    return rows(
        (1.0, Submit(request), [step(1, 7)]),
        (1.5, done(1), [Emit(((7, 0, 99),)), Save(1, blocks)]),
        (1.6, Moved(1, 3), []),
    )


def done(step_id: int) -> StepDone:
    return StepDone(StepResult(step_id, ()))


def second_engine(*, fetches: bool = True, num_early: int = 0) -> list[Row]:
    moved = Request(3, PROMPT, SamplingParams(5), 1.0, output=(99,))
    other = Request(4, (5, 5, 5, 5, 5), SamplingParams(5), 1.0)  # begun here
    blocks = tuple((number, d) for number, d in enumerate(prefix_digests(PROMPT, 4)))
    calls: list[tuple[float, object, list[Instruction]]] = [
        (1.55, Submit(other), [step(1, 4)]),
        (1.75, Submit(moved), [Fetch(1, blocks[num_early:], 2.0)] if fetches else []),
        (1.8, done(1), [Emit(((4, 0, 1),)), step(2, 4)]),
    ]
    if fetches:
        calls.append((1.95, Moved(1, 3 - num_early), []))
    if num_early:
        early = FetchEarly(tuple(digest for _, digest in blocks[:num_early]))
        calls.insert(0, (1.4, early, [Fetch(9, blocks[:num_early], 2.0)]))
        calls.insert(1, (1.45, Moved(9, num_early), []))
    calls += [(2.0, done(2), [step(3, 3)]), (2.1, done(3), [Emit(((3, 1, 8), (4, 1, 1)))])]
    return rows(*calls)


def test_the_pause_has_parts_that_add_up() -> None:
    logs = {"a": read_engine(first_engine()), "b": read_engine(second_engine())}
    (stream,) = continued(logs)
    assert (stream.num_tokens, stream.num_fetched) == (13, 3)
    parts = stream.parts_ms()
    expected = {"handed_over": 250.0, "fetched": 200.0, "planned": 50.0, "computed": 100.0}
    assert parts == pytest.approx(expected)
    assert sum(parts.values()) == pytest.approx(1e3 * (2.1 - 1.5))
    again = {"a": read_engine(first_engine()), "b": read_engine(second_engine(fetches=False))}
    (stream,) = continued(again)
    assert (stream.num_fetched, stream.fetched_s) == (0, None)
    assert stream.parts_ms()["fetched"] == 0.0


def test_what_came_before_the_stream_is_counted_and_costs_no_pause() -> None:
    logs = {"a": read_engine(first_engine()), "b": read_engine(second_engine(num_early=2))}
    (stream,) = continued(logs)
    assert (stream.num_fetched, stream.num_early) == (3, 2)
    assert stream.parts_ms()["fetched"] == pytest.approx(200.0)
    whole = {"a": logs["a"], "b": read_engine(second_engine(fetches=False, num_early=3))}
    (stream,) = continued(whole)
    assert (stream.num_fetched, stream.num_early, stream.fetched_s) == (3, 3, None)
    assert stream.parts_ms()["fetched"] == 0.0


def test_what_began_and_ended_on_one_engine_did_not_move() -> None:
    alone = read_engine(second_engine())
    assert continued({"b": alone}) == []  # its first engine is not known


def test_rates_are_of_moves_that_moved_something() -> None:
    moves = [Move(True, 3, 0.0, 0.2), Move(True, 0, 0.2, 9.0), Move(False, 4, 0.0, 1.0)]
    assert bytes_per_s(moves, BLOCK_BYTES, is_fetch=True) == pytest.approx(15_000)
    assert bytes_per_s(moves, BLOCK_BYTES, is_fetch=False) == pytest.approx(4000)
    assert bytes_per_s(moves[1:2], BLOCK_BYTES, is_fetch=True) == 0.0


def test_a_link_is_what_was_seen() -> None:
    logs = {"a": read_engine(first_engine()), "b": read_engine(second_engine())}
    link = measured_link(logs, BLOCK_BYTES)
    assert link.bytes_per_s == pytest.approx(3 * BLOCK_BYTES / 0.2)
    assert link.latency_s == pytest.approx(0.25)
    nothing = replace(logs["b"], moves=[])
    with pytest.raises(MeasurementError, match="no KV"):
        measured_link({"a": logs["a"], "b": nothing}, BLOCK_BYTES)
