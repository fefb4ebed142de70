"""What streams lose by moving: pauses from token to token, and tokens computed again."""

from __future__ import annotations

import pytest

from actors.fleet.moves import OpenStream
from actors.scheduling.events import Submit
from actors.scheduling.request import Request, SamplingParams
from app.simulate.run.engine import SimulatedEngine
from app.simulate.run.moved import MovedStreams
from app.simulate.run.record import RunRecord
from app.simulate.run.replica import Replica, build_replica
from app.simulate.run.simulation import Deployment, scheduler_config
from tests.app.simulate.run.test_replica import PLAIN

CONFIG = scheduler_config(PLAIN, token_budget=512)


class Moving:
    """One stream that engines hand on, by hand."""

    def __init__(self) -> None:
        self.record = RunRecord(1)
        self.moved = MovedStreams(self.record)
        self.num_engines = 0

    def engine(self) -> SimulatedEngine:
        deployment = Deployment(CONFIG, PLAIN)
        replica = build_replica(deployment, CONFIG, self.record, self.num_engines, 0, None)
        self.num_engines += 1
        self.moved.watch(replica)
        return SimulatedEngine(replica, 0.0)

    def advance(self, replica: Replica) -> float:
        now_s = replica.advance()
        self.moved.look(replica)
        return now_s

    def send(self, request: Request, engine: SimulatedEngine, now_s: float) -> None:
        self.record.replica[0] = engine.replica.index
        engine.replica.submit(Submit(request), now_s)

    def take(self, engine: SimulatedEngine, now_s: float) -> tuple[OpenStream, Request]:
        ((stream, request),) = engine.streams()
        engine.replica.withdraw([0], now_s)
        self.moved.left(stream, now_s)
        return stream, request


def test_a_pause_is_from_token_to_token_however_often_the_stream_moves() -> None:
    moving = Moving()
    first, second, third = (moving.engine() for _ in range(3))
    moving.send(Request(0, (1,) * 100, SamplingParams(max_tokens=9), 0.0), first, 0.0)
    for _ in range(3):
        last_s = moving.advance(first.replica)
    assert last_s == pytest.approx(0.110 + 2 * 0.011)
    _, request = moving.take(first, last_s)
    moving.send(request, second, 0.2)
    assert moving.moved.pauses_s == []
    _, request = moving.take(second, 0.25)  # before its first token there
    moving.send(request, third, 0.3)
    next_s = moving.advance(third.replica)
    moving.advance(third.replica)
    assert moving.moved.pauses_s == pytest.approx([next_s - last_s])
    totals = moving.moved.totals(num_bytes=5.0, busiest_s=moving.record.end_s / 2)
    assert totals is not None
    assert totals.num_streams == 2
    # 103 tokens are known. Each next engine computes them, and without a move only the last one.
    assert totals.num_recomputed_tokens == 2 * 102
    assert totals.num_gaps_before == 2
    assert totals.busiest_link == 0.5
    assert totals.to_dict()["pause_max_s"] == pytest.approx(next_s - last_s)
    assert moving.moved.moves == [(last_s, 0), (0.25, 0)]


def test_of_a_stream_without_a_token_only_the_move_is_noted() -> None:
    moving = Moving()
    first, second = moving.engine(), moving.engine()
    request = Request(0, (1,) * 100, SamplingParams(max_tokens=2), 0.0)
    moving.send(request, first, 0.0)
    stream, request = moving.take(first, 0.05)
    assert not stream.sensitive
    moving.send(request, second, 0.05)
    moving.advance(second.replica)
    assert moving.moved.moves == [(0.05, 0)]
    assert moving.moved.totals() is None
    wasted = moving.moved.totals(num_bytes=3.0)  # a copy that came to nothing
    assert wasted is not None
    assert wasted.to_dict() == {
        **dict.fromkeys(wasted.to_dict(), 0),
        "num_bytes": 3.0,
    }


def test_an_engine_s_token_ends_only_pauses_of_its_own_streams() -> None:
    moving = Moving()
    first, second = moving.engine(), moving.engine()
    moving.send(Request(0, (1,) * 100, SamplingParams(max_tokens=9), 0.0), first, 0.0)
    last_s = moving.advance(first.replica)
    _, request = moving.take(first, last_s)
    moving.send(request, second, last_s)
    moving.record.num_output_tokens[0] += 1
    moving.moved.look(first.replica)
    assert moving.moved.pauses_s == []
