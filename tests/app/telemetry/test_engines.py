"""A front's engines at `/metrics`: sums, series of each, and nothing of those that have ended."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from actors.scheduling.request import Objective
from app.api.events import Deliveries, RequestInfo
from app.telemetry.engines import FrontEngines, occupancy
from app.telemetry.live import KnownEngine, Telemetry
from app.telemetry.prometheus import render
from tests.app.telemetry.test_fleet import PREFILL, QUICK, step, stream


@dataclass(frozen=True)
class Said:
    engine_id: str
    num_free_blocks: int = 100
    accepts: bool = True
    num_running: int = 3
    num_waiting: int = 1
    num_blocks: int = 100
    tokens_per_s: float = 40.0
    least_slack_s: float = inf


def value(telemetry: Telemetry, name: str, **labels: str) -> float | None:
    return telemetry.metrics.registry.get_sample_value(
        f"legato_{name}", {"model_name": "tiny", **labels}
    )


def test_engines_are_added_up() -> None:
    assert occupancy([Said("a"), Said("b", 50)]) == (6, 2, 0.25)
    assert occupancy([]) == (0, 0, 0.0)


def test_an_idle_engine_computes_nothing() -> None:
    telemetry = Telemetry("tiny")
    telemetry.show_engines(FrontEngines([Said("a"), Said("b", num_running=0)]))
    found = [value(telemetry, "engine_tokens_per_second", engine=engine) for engine in "ab"]
    assert found == [40.0, 0.0]


def test_each_engine_has_its_series_while_it_is_there() -> None:
    telemetry = Telemetry("tiny")
    telemetry.on_iterations([step(1, 1.0, 1.1, token_budget=96, holds_starts=True)], "a")
    telemetry.on_iterations([step(1, 1.2, 1.3, token_budget=64)], "b")  # the last to report
    both = [Said("a", 50, least_slack_s=0.02), Said("b", accepts=False)]
    telemetry.show_engines(FrontEngines(both, num_moves=5, num_lost=1))
    assert value(telemetry, "num_requests_running") == 6
    assert value(telemetry, "kv_cache_usage_perc") == 0.25
    assert (value(telemetry, "token_budget"), value(telemetry, "starts_held_back")) == (96, 1)
    assert value(telemetry, "stream_moves_total") == 5
    assert value(telemetry, "engines_lost_total") == 1
    names = ("serving", "num_requests_running", "kv_cache_usage_perc", "token_budget",
             "starts_held_back", "least_slack_seconds")  # fmt: skip
    found = {
        engine: [value(telemetry, f"engine_{name}", engine=engine) for name in names]
        for engine in "ab"
    }
    assert found == {"a": [1, 3, 0.5, 96, 1, 0.02], "b": [0, 3, 0, 64, 0, None]}
    telemetry.show_engines(FrontEngines([Said("b")]))
    assert value(telemetry, "engine_num_requests_running", engine="a") is None
    assert value(telemetry, "token_budget") == 64


def test_missed_gaps_are_those_of_the_engine_where_the_stream_was() -> None:
    telemetry = Telemetry("tiny", KnownEngine(Objective(0.1)))
    stream(telemetry, "on a", (10.1, "a"))
    stream(telemetry, "on b", (10.1, "b"))
    stream(telemetry, "moved", (10.1, "a"), (11.1, "b"))
    telemetry.on_iterations(PREFILL, "a")
    telemetry.on_iterations(QUICK, "b")
    telemetry.show_engines(FrontEngines([Said("a"), Said("b")]))
    shown = render([telemetry.metrics]).decode().splitlines()
    name = "legato_engine_tbt_objective_missed_total{"
    series = sorted(line.removeprefix(name) for line in shown if line.startswith(name))
    assert [line for line in series if not line.endswith("} 0.0")] == [
        'cause="move",engine="b",model_name="tiny"} 1.0',
        'cause="prefill",engine="a",model_name="tiny"} 1.0',
        'cause="scheduling",engine="b",model_name="tiny"} 1.0',
    ]
    telemetry.show_engines(FrontEngines([Said("b")]))
    missed = "engine_tbt_objective_missed_total"
    assert value(telemetry, missed, engine="a", cause="prefill") is None
    assert value(telemetry, "tbt_objective_missed_total", cause="prefill") == 1  # of all, for ever


def test_a_gap_across_a_rebuild_of_its_engine_is_the_recovery_s() -> None:
    """The stream stays, as no other engine can take it: the engine replays it."""
    telemetry = Telemetry("tiny", KnownEngine(Objective(0.1)))
    request = RequestInfo("stays", "/v1/completions", "", True, 7, 1)
    deliveries = Deliveries([(11.0, 1, 0, 1), (12.5, 1, 0, 1)])
    deliveries.places.append((10.1, 0, "a"))
    telemetry.on_request_start(request, 10.0, deliveries)
    rebuilt = [step(1, 12.3, 12.499, num_recoveries=1), step(2, 12.5, 12.51, num_recoveries=1)]
    telemetry.on_iterations([step(40, 10.98, 10.999), *rebuilt], "a")
    telemetry.on_iterations(QUICK, "b")
    telemetry.show_engines(FrontEngines([Said("a"), Said("b")]))
    missed = "engine_tbt_objective_missed_total"
    assert value(telemetry, missed, engine="a", cause="recovery") == 1


def test_a_lone_replica_has_none_of_these_series() -> None:
    telemetry = Telemetry("tiny")
    telemetry.on_iterations([step(1, 1.0, 1.1)])
    shown = render([telemetry.metrics_now()]).decode().splitlines()
    assert not [line for line in shown if line.startswith(("legato_engine", "legato_stream"))]
