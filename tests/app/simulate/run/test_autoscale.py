"""A simulated fleet's engines start after their cold start, and drain when they are too many."""

from __future__ import annotations

import numpy as np

from actors.fleet.scaling import Bounds
from actors.fleet.snapshot import EngineState
from app.simulate.run.autoscale import Scaler
from app.simulate.run.deployment import Autoscale, Deployment
from app.simulate.run.fleet import SimulatedFleet
from app.simulate.run.record import RunRecord
from app.simulate.run.replica import INFINITY
from app.simulate.run.simulation import requests_of, scheduler_config
from app.simulate.workload.requests import Workload
from tests.app.simulate.run.test_handover import FAST

# An engine per two requests, decided every second; an engine starts in 1.5 s.
SCALE = Autoscale(
    "queue_length",
    {"target": 2.0, "upscale_delay_s": 0.0, "downscale_delay_s": 0.0, "look_back_s": 0.0},
    Bounds(1, 3), interval_s=1.0, start_s=1.5, drain_s=60.0,
)  # fmt: skip


class Scaled:
    """A fleet of one engine, and requests for these numbers of tokens; each takes about 10 ms."""

    def __init__(self, *num_tokens: int) -> None:
        count = len(num_tokens)
        workload = Workload(np.zeros(count), np.full(count, 100), np.array(num_tokens))
        deployment = Deployment(
            scheduler_config(FAST, token_budget=512), FAST, routing="round_robin", autoscale=SCALE
        )
        self.fleet = SimulatedFleet(deployment, RunRecord(count), 0, None)
        self.scaler = Scaler(self.fleet, SCALE)
        self.requests = [requests_of(workload)(index) for index in range(count)]

    def submit(self, number: int, now_s: float = 0.0) -> None:
        """The next ones."""
        for _ in range(number):
            self.fleet.submit(self.requests.pop(0), now_s)

    @property
    def num_serving(self) -> int:
        return sum(engine.accepts for engine in self.fleet.engines.values())

    def run(self, until_s: float) -> None:
        fleet = self.fleet
        while True:
            replica = fleet.earliest()
            step_s = INFINITY if replica is None else replica.next_s
            if min(step_s, fleet.timers.next_s) > until_s:
                return
            if replica is None or fleet.timers.next_s < step_s:
                fleet.timers.run_next()
            else:
                fleet.touched(replica, replica.advance())


def test_engines_that_start_are_counted_until_they_serve() -> None:
    run = Scaled(*[2000] * 5)
    run.submit(5)
    run.run(0.99)
    assert run.scaler.decisions == []
    run.run(1.01)
    assert run.scaler.decisions == [(1.0, 3)]
    assert (run.num_serving, run.scaler.num_starting) == (1, 2)
    run.run(2.01)  # they are still wanted, and not started twice
    assert run.scaler.decisions[-1] == (2.0, 3)
    assert (run.num_serving, run.scaler.num_starting) == (1, 2)
    run.run(2.49)
    assert run.num_serving == 1
    run.run(2.51)
    assert (run.num_serving, run.scaler.num_starting) == (3, 0)
    assert [list(loads) for loads in run.scaler.loads] == [["engine-0"], ["engine-0"]]


def test_the_engines_with_fewest_streams_drain_and_end_empty() -> None:
    """All requests are on the first engine, and one of them outlives the others."""
    run = Scaled(600, *[150] * 4)
    run.submit(5)
    run.run(2.51)
    assert run.num_serving == 3
    first = run.fleet.engines["engine-0"]
    assert first.replica.num_live == 1
    run.run(3.01)
    assert run.scaler.decisions[-1] == (3.0, 1)
    assert list(run.fleet.engines) == ["engine-0"], "those that have nothing end at once"
    assert first.state is EngineState.SERVING
    run.run(8.0)
    assert run.fleet.all[0].num_live == 0
    assert run.scaler.decisions[-1][1] == 1
    assert list(run.fleet.engines) == ["engine-0"], "the least number stays"


def test_nothing_drains_while_an_engine_starts() -> None:
    """Another decision follows once it serves."""
    run = Scaled(*[350] * 3, *[80] * 3)
    run.submit(3)
    run.run(2.6)
    assert run.num_serving == 2
    run.submit(3, now_s=2.6)
    run.run(4.01)
    assert [wanted for _, wanted in run.scaler.decisions] == [2, 2, 3, 1]
    assert (run.num_serving, run.scaler.num_starting) == (2, 1)
    run.run(4.99)
    assert run.num_serving == 3
    run.run(5.01)
    assert run.num_serving == 1
