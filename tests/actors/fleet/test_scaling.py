"""Scaling stays within bounds, does not flap, and is there before promises break."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.fleet.publish import Publisher
from actors.fleet.scaling import SCALINGS, Bounds, EngineLoad, build_scaling, load_of
from actors.scheduling.build import build_core
from actors.scheduling.config import ConfigError
from actors.scheduling.cost.model import CostModel
from actors.scheduling.cost.online import OnlineCostModel
from actors.scheduling.events import Execute, Instruction, Reconfigure, StepDone, Submit
from actors.scheduling.plan import StepResult
from actors.scheduling.request import Request, SamplingParams
from tests.actors.fleet.pictures import BITS, load, snapshot
from tests.actors.scheduling.modeled import modeled

loads_st = st.dictionaries(
    st.sampled_from("abcdefgh"),
    st.builds(
        EngineLoad,
        time_s=st.floats(0.0, 100.0),
        num_running=st.integers(0, 200).map(float),
        num_waiting=st.integers(0, 500).map(float),
        prefilled_tokens=st.integers(0, 10**7).map(float),
        prefill_tokens=st.integers(0, 10**6).map(float),
        prefill_rate=st.just(0.0) | st.floats(10.0, 1e5),
        decode_share=st.floats(0.0, 1.0),
        promised_s=st.floats(0.0, 100.0),
        slack_share=st.floats(-2.0, 1.0),
        ttft_s=st.just(0.0) | st.floats(0.1, 10.0),
        used_places=st.floats(0.0, 1.0),
        accepts=st.sampled_from((0.0, 1.0)),
    ),
)


@pytest.mark.parametrize("name", SCALINGS)
@given(
    seen=st.lists(
        st.tuples(loads_st, st.integers(0, 5), st.integers(0, 9), st.floats(0.0, 60.0)),
        min_size=1, max_size=12,
    ),
    least=st.integers(0, 4),
    more=st.integers(0, 8),
)  # fmt: skip
def test_whatever_is_seen_the_bounds_hold(
    name: str, seen: list[tuple[dict[str, EngineLoad], int, int, float]], least: int, more: int
) -> None:
    scaling, bounds = build_scaling(name), Bounds(least, max(1, least + more))
    now_s = 0.0
    for loads, num_starting, num_queued, passed_s in seen:
        now_s += passed_s
        wanted = scaling.wanted(loads, num_starting, num_queued, now_s, bounds)
        assert least <= wanted <= max(1, least + more)
        if num_queued and not loads:
            assert wanted >= 1


class Traffic:
    """Engines that share so many prompt tokens a second, each with `rate` of its own."""

    def __init__(self, scaling: str, bounds: Bounds, start_s: float, **options: Any) -> None:
        self.scaling = build_scaling(scaling, options)
        self.bounds = bounds
        self.start_s = start_s
        self.have = max(bounds.least, 1)
        self.starting: list[float] = []
        self.done: dict[str, float] = {}
        self.history: list[int] = []

    def run(self, now_s: float, until_s: float, tokens_per_s: float, step_s: float = 5.0) -> float:
        while now_s < until_s:
            now_s += step_s
            ready = [s for s in self.starting if s <= now_s]
            self.starting = self.starting[len(ready) :]
            self.have += len(ready)
            for index in range(self.have):
                name = f"{index}"
                self.done[name] = self.done.get(name, 0.0) + tokens_per_s * step_s / self.have
            busy = 1.0 if tokens_per_s else 0.0
            loads = {
                f"{i}": load(time_s=now_s, num_running=busy, prefilled_tokens=self.done[f"{i}"])
                for i in range(self.have)
            }
            wanted = self.scaling.wanted(loads, len(self.starting), 0, now_s, self.bounds)
            self.history.append(wanted)
            self.starting += [now_s + self.start_s] * (wanted - self.have - len(self.starting))
            if not self.starting:
                self.have = min(self.have, wanted)
        return now_s


def test_steady_traffic_gets_steady_engines() -> None:
    traffic = Traffic("slack", Bounds(1, 16), 30.0, target=0.75)
    now_s = traffic.run(0.0, 600.0, 4000.0)  # four engines' worth
    settled = traffic.history[-1]
    assert settled == math.ceil(4.0 / 0.75)
    traffic.history.clear()
    traffic.run(now_s, now_s + 3600.0, 4000.0)
    assert set(traffic.history) == {settled}


def test_traffic_that_wavers_does_not_make_engines_come_and_go() -> None:
    traffic = Traffic("slack", Bounds(1, 16), 30.0)
    now_s = traffic.run(0.0, 600.0, 4000.0)
    traffic.history.clear()
    for step in range(120):  # an hour
        now_s = traffic.run(now_s, now_s + 30.0, 4000.0 + 400.0 * (-1) ** step)
    changes = sum(a != b for a, b in zip(traffic.history, traffic.history[1:], strict=False))
    assert changes <= 2


def test_growing_traffic_finds_engines_already_there() -> None:
    traffic = Traffic("slack", Bounds(1, 32), 60.0, ahead_s=60.0, target=0.8)
    now_s, rate = 0.0, 1000.0
    now_s = traffic.run(now_s, 300.0, rate)
    while rate < 10_000.0:
        rate *= 1.15
        now_s = traffic.run(now_s, now_s + 30.0, rate)
        assert traffic.have > rate / 1000.0  # never as busy as they can be
    for _ in range(20):
        now_s = traffic.run(now_s, now_s + 60.0, 1000.0)
    assert traffic.have <= 3


def test_a_number_of_requests_for_each_engine_changes_engines_after_its_delays() -> None:
    options = {"target": 10.0, "upscale_delay_s": 30.0, "downscale_delay_s": 600.0}
    scaling = build_scaling("queue_length", {**options, "look_back_s": 20.0})
    have, now_s = 1, 0.0

    def look(num_requests: int, for_s: float) -> list[int]:
        """What is wanted of these engines, looked at every 10 s."""
        nonlocal have, now_s
        wanted = list[int]()
        for _ in range(int(for_s / 10)):
            now_s += 10.0
            running, waiting = num_requests // 2, num_requests // 4
            here = load(num_running=running / max(have, 1), num_waiting=waiting / max(have, 1))
            loads = {f"{i}": here for i in range(have)}
            num_queued = num_requests - running - waiting
            wanted.append(scaling.wanted(loads, 0, num_queued, now_s, Bounds(0, 8)))
            have = wanted[-1]
        return wanted

    assert look(10, 100.0) == [1] * 10
    assert look(40, 20.0) == [1, 1]  # a burst: it ends before its delay
    assert look(10, 100.0) == [1] * 10
    assert look(40, 60.0) == [1, 1, 1, 4, 4, 4]
    assert look(10, 500.0) == [4] * 50
    assert look(40, 30.0) == [4] * 3
    assert look(10, 700.0) == [4] * 60 + [1] * 10
    assert look(0, 700.0)[-1] == 0
    assert look(1, 10.0) == [1]  # none is here: at once


def test_broken_promises_ask_for_more_than_the_mean_says() -> None:

    def wanted(loads: dict[str, EngineLoad]) -> int:
        return build_scaling("slack").wanted(loads, 0, 0, 0.0, Bounds(1, 16))

    calm = {str(i): load(num_running=1) for i in range(4)}
    assert wanted(calm) == 4  # not calm for long enough
    late = {str(i): load(num_running=1, promised_s=3.0) for i in range(4)}
    assert wanted(late) > 4
    slow = {str(i): load(num_running=1, slack_share=-0.1) for i in range(4)}
    assert wanted(slow) > 4


@pytest.mark.parametrize(("num_late", "then"), [(1, 3), (4, 7)])
def test_engines_that_start_count_towards_those_that_are_missing(num_late: int, then: int) -> None:
    """Serve asks ten times a second, of loads that change every two, while engines start."""
    scaling, bounds = build_scaling("slack"), Bounds(1, 16)
    late = {str(i): load(num_running=1, num_waiting=9, promised_s=3.0) for i in range(num_late)}
    asked = [num_late]
    for step in range(300):
        num_starting = asked[-1] - num_late
        asked.append(scaling.wanted(late, num_starting, 0, 0.1 * step, bounds))
    assert set(asked[1:]) == {num_late + 1}
    # Those that have started are late as well: now more are missing.
    loads = late | {"new": load(num_running=1, num_waiting=9, promised_s=3.0)}
    assert scaling.wanted(loads, 0, 0, 40.0, bounds) == then


MODEL = CostModel(
    "m", ((1, 0.010), (32, 0.010), (64, 0.040), (2048, 0.400)), decode_kv_s=1e-8, kv_tokens=60_000,
    max_model_len=4096,
)  # fmt: skip


def loaded(num_streams: int, num_waiting: int, tbt_s: float, ttft_s: float, budget: str) -> Any:
    """An engine that decodes so many streams, when prompts have just come."""
    token_budget = {"token_budget": 2048} if budget == "fixed" else {}
    config = modeled(MODEL, budget=budget, tbt_s=1.0, **token_budget)
    core, now_s = build_core(config, cost_model=OnlineCostModel(MODEL)), 0.0
    steps = deque[Instruction]()
    for number in range(num_streams):
        steps += core.handle(Submit(Request(number, (0,) * 8, SamplingParams(1000), now_s)), now_s)
    while len(core.view.decoding) < num_streams:
        execute = steps.popleft()
        assert isinstance(execute, Execute)
        now_s += execute.predicted_s or 0.0
        tokens = tuple((piece[0], 0) for piece in execute.plan.slices if piece[3])
        done = StepDone(StepResult(execute.plan.step_id, tokens))
        steps += [i for i in core.handle(done, now_s) if isinstance(i, Execute)]
    core.handle(Reconfigure({"tbt_ms": 1e3 * tbt_s, "ttft_ms": 1e3 * ttft_s}), now_s)
    for number in range(num_streams, num_streams + num_waiting):
        core.handle(Submit(Request(number, (0,) * 1024, SamplingParams(9), now_s)), now_s)
    return load_of(Publisher("a", BITS, core).snapshot(now_s), now_s)


@pytest.mark.parametrize(
    ("num_streams", "num_waiting", "tbt_s", "ttft_s", "budget", "is_broken"),
    [
        # The prompt that is asked about takes 0.2 s at any engine.
        (0, 0, 1.0, 0.1, "adaptive", False),
        (0, 9, 1.0, 0.1, "adaptive", True),
        (0, 1, 1.0, 0.3, "adaptive", True),
        (0, 9, 1.0, 9.0, "adaptive", False),
        # A stream waits for 10 ms, and beside 59 others for 40 ms.
        (0, 0, 0.005, 999.0, "adaptive", False),
        (60, 0, 0.005, 999.0, "adaptive", False),
        (60, 0, 0.030, 999.0, "adaptive", True),
        (60, 0, 0.200, 999.0, "adaptive", False),
        # And if steps are filled up with prefill, for 400 ms.
        (0, 0, 0.200, 999.0, "fixed", False),
        (60, 0, 0.200, 999.0, "fixed", False),
        (60, 0, 0.402, 999.0, "fixed", False),
    ],
)
def test_only_what_more_engines_would_mend_asks_for_more(
    num_streams: int, num_waiting: int, tbt_s: float, ttft_s: float, budget: str, is_broken: bool
) -> None:
    seen = loaded(num_streams, num_waiting, tbt_s, ttft_s, budget)
    without = {"decode_share": 0.0, "prefill_tokens": 0.0, "used_places": 0.0}  # other reasons
    loads = dict.fromkeys("abcd", replace(seen, **without))
    wanted = build_scaling("slack").wanted(loads, 0, 0, 0.0, Bounds(1, 16))
    assert wanted == (5 if is_broken else 4)


def test_an_idle_fleet_ends_and_a_request_wakes_it() -> None:
    for name, options in (
        ("slack", {"idle_s": 50.0, "calm_s": 20.0}),
        ("queue_length", {"downscale_delay_s": 50.0}),
    ):
        scaling, bounds = build_scaling(name, options), Bounds(0, 4)
        wanted = [scaling.wanted({"a": load()}, 0, 0, 10.0 * step, bounds) for step in range(30)]
        assert wanted[0] == 1, name
        assert wanted[-1] == 0, name
        assert build_scaling(name).wanted({}, 0, 1, 400.0, bounds) == 1, name
        assert build_scaling(name).wanted({}, 0, 0, 400.0, bounds) == 0, name


def test_loads_travel_as_plain_numbers() -> None:
    said = load_of(snapshot("a", num_running=32, least_slack_s=0.02), 7.0)
    assert (said.used_places, said.slack_share, said.accepts) == (0.5, pytest.approx(0.2), 1.0)
    assert said.promised_s == pytest.approx(2 * (0.1 + 1024 / 1000.0))
    assert EngineLoad.from_stats({**said.to_stats(), "open_requests": 3.0}) == said
    with pytest.raises(KeyError, match="promised_s"):
        EngineLoad.from_stats({k: v for k, v in said.to_stats().items() if k != "promised_s"})


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="scaling_options"):
        build_scaling("slack", {"target": 7.0})
    with pytest.raises(ConfigError, match="scaling_options"):
        build_scaling("queue_length", {"targets": 7})
