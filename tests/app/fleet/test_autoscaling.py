"""Serve's autoscaling policy over what engines say of themselves."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from actors.fleet.scaling import EngineLoad
from actors.scheduling.config import ConfigError
from app.fleet.autoscaling import Autoscaler, loads_of
from app.fleet.registry import Registry
from tests.app.fleet.test_adapters import Store

IDLE = EngineLoad(
    time_s=0.0,
    num_running=0,
    num_waiting=0,
    prefilled_tokens=0,
    prefill_tokens=0,
    prefill_rate=1000.0,
    decode_share=0.0,
    promised_s=0.1,
    slack_share=1.0,
    ttft_s=2.0,
    used_places=0.0,
    accepts=1.0,
)


@dataclass(frozen=True)
class Sample:
    value: float


@dataclass
class Context:
    """As Serve's controller makes it."""

    loads: dict[str, EngineLoad]
    target_num_replicas: int
    capacity_adjusted_min_replicas: int = 1
    capacity_adjusted_max_replicas: int = 3
    current_time: float = 0.0  # by the wall clock, which may stand at any time
    app_name: str = "app"
    deployment_name: str = "Engine"

    @property
    def raw_metrics(self) -> dict[str, dict[str, list[Sample]]]:
        found: dict[str, dict[str, list[Sample]]] = {}
        for replica, load in self.loads.items():
            for name, value in load.to_stats().items():
                found.setdefault(name, {})[replica] = [Sample(-1.0), Sample(value)]
        return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The test says what time it is."""
    made = SimpleNamespace(now_s=0.0)
    made.monotonic = lambda: made.now_s
    monkeypatch.setattr("app.fleet.autoscaling.time", made)
    return made


def run(clock: SimpleNamespace, seconds: int, loads: Any, **options: float) -> list[int]:
    """Replicas wanted, second by second; those asked for are there at once."""
    policy = Autoscaler("slack", **options)
    target, wanted = 1, list[int]()
    for now_s in range(seconds):
        clock.now_s = float(now_s)
        here = {f"e{n}": loads(n, now_s, target) for n in range(target)}
        target, _ = policy(Context(here, target))
        wanted.append(target)
    return wanted


def test_loads_are_read_as_they_were_told() -> None:
    assert loads_of(Context({"a": IDLE}, 1).raw_metrics) == {"a": IDLE}
    assert loads_of({"num_running": {"a": [Sample(1.0)]}}) == {}
    assert loads_of({"num_running": {"a": []}}) == {}


def test_full_places_bring_engines_and_rest_takes_them_away(clock: SimpleNamespace) -> None:
    def load(number: int, now_s: int, have: int) -> EngineLoad:
        used = 2.4 / have if now_s < 60 else 0.0
        busy = float(now_s < 60)
        return replace(IDLE, time_s=now_s, used_places=used, num_running=busy)

    wanted = run(clock, 200, load, ahead_s=5, smoothing_s=5, calm_s=30)
    assert wanted[59] == 3
    assert wanted[-1] == 1
    assert min(wanted[10:60]) == 3, "it never gives up what is in use"


def test_an_engine_that_rebuilds_its_stages_is_one_of_those_that_stay(
    clock: SimpleNamespace,
) -> None:
    """It serves again long before one that takes its place would."""

    def load(number: int, now_s: int, have: int) -> EngineLoad:
        rebuilds = number == 0 and 20 <= now_s < 25
        used = 0.0 if rebuilds else 2.7 / have
        return replace(
            IDLE, time_s=now_s, used_places=used, num_running=9.0, accepts=float(not rebuilds)
        )

    wanted = run(clock, 40, load, calm_s=10)
    assert set(wanted[10:]) == {3}


def test_an_engine_that_drains_is_not_replaced_where_fewer_are_wanted() -> None:
    policy = Autoscaler("slack")
    busy = replace(IDLE, num_running=1.0, used_places=0.9)
    loads = {"a": busy, "b": busy, "leaves": replace(busy, accepts=0.0)}
    assert policy(Context(loads, 2))[0] == 2


def test_bounds_are_the_deployments(clock: SimpleNamespace) -> None:
    def load(number: int, now_s: int, have: int) -> EngineLoad:
        return replace(IDLE, time_s=now_s, used_places=9.0, num_running=9.0)

    assert max(run(clock, 30, load)) == 3


def test_a_wrong_option_is_refused_where_it_is_given() -> None:
    with pytest.raises(ConfigError):
        Autoscaler("slack", targt=0.5)
    with pytest.raises(ConfigError):
        Autoscaler("slak")


class Fronts:
    """What the cluster's store says of the fronts."""

    count = 0
    num_asked = 0

    def num_waiting(self, now_s: float) -> int:
        self.num_asked += 1
        return self.count


def test_requests_waiting_at_the_fronts_wake_a_sleeping_fleet(
    monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace
) -> None:
    """Also while the wall clock has stepped back."""
    fronts, names = Fronts(), set[str]()

    def registry(application: str, deployment: str) -> Fronts:
        names.add(f"{application}/{deployment}")
        return fronts

    monkeypatch.setattr("app.fleet.autoscaling.registry_of", registry)
    policy = Autoscaler("slack")
    asleep = Context({}, 0, capacity_adjusted_min_replicas=0)
    assert policy(asleep)[0] == 0
    fronts.count = 2
    clock.now_s = 0.5
    assert policy(replace(asleep, current_time=-600.0))[0] == 0  # asked once a second
    clock.now_s = 1.5
    assert policy(replace(asleep, current_time=-599.0))[0] == 1
    assert (fronts.num_asked, names) == (2, {"app/Engine"})


def test_fronts_of_a_fleet_that_never_sleeps_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.fleet.autoscaling.registry_of", lambda *names: pytest.fail("asked"))
    assert Autoscaler("slack")(Context({}, 1))[0] == 1


async def test_reports_of_fronts_that_have_ended_are_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Store()
    monkeypatch.setattr("app.fleet.registry.internal_kv", store)
    registry = Registry("app/Engine")
    for front_id, count in (("ended", 3), ("waits", 2), ("idle", 0)):
        await registry.report_waiting(front_id, count)
    assert registry.num_waiting(7.0) == 5
    assert registry.num_waiting(67.0) == 0  # the front may only be slow
    assert len(store.values) == 2
    assert registry.num_waiting(3600.0) == 0
    assert not store.values


async def test_a_controller_that_starts_again_counts_no_report_of_long_ago(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, begin_s = Store(), time.time()
    monkeypatch.setattr("app.fleet.registry.internal_kv", store)
    clock = SimpleNamespace(time=lambda: begin_s)
    monkeypatch.setattr("app.fleet.registry.time", clock)
    front, before, again = [Registry("app/Engine") for _ in range(3)]
    await front.report_waiting("front", 2)
    assert before.num_waiting(5.0) == 2
    clock.time = lambda: begin_s + 400.0
    assert again.num_waiting(5.0) == 0  # its front has died meanwhile
    clock.time = lambda: begin_s + 401.0
    await front.report_waiting("front", 3)
    clock.time = lambda: begin_s + 801.0  # by a clock that goes so far before the front's
    assert again.num_waiting(6.0) == 3


@pytest.mark.parametrize("ahead_s", [-100.0, 100.0])
async def test_a_front_with_another_clock_wakes_a_sleeping_fleet(
    monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    monkeypatch.setattr("app.fleet.registry.internal_kv", Store())
    reader, front = Registry("app/Engine"), Registry("app/Engine")
    begin_s = time.time()
    for number in range(10):
        clock = SimpleNamespace(time=partial(float, begin_s + ahead_s + 5.0 * number))
        monkeypatch.setattr("app.fleet.registry.time", clock)
        await front.report_waiting("front", 2)
        assert reader.num_waiting(5.0 * number) == 2
    assert reader.num_waiting(5.0 * number + 20.0) == 0  # it has died
