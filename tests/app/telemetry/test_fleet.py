"""A front's telemetry: several engines' iterations, and streams that run on one of them or move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from actors.scheduling.request import Objective
from actors.transport.messages import IterationRecord
from app.api.events import Deliveries, RequestInfo, RequestOutcome
from app.telemetry.engines import FrontEngines
from app.telemetry.live import KnownEngine, Telemetry
from app.telemetry.records import RecordLog
from tests.actors.fleet.pictures import snapshot

OBJECTIVE = Objective(0.1)


def step(number: int, begin_s: float, end_s: float, **changes: Any) -> IterationRecord:
    plain: dict[str, Any] = {
        "step": number,
        "submitted_s": begin_s,
        "done_s": end_s,
        "predicted_s": None,
        "num_decode_tokens": 4,
        "num_prefill_tokens": 0,
        "num_requests": 4,
        "stages_s": ((begin_s, end_s),),
        "num_decoding": 4,
        "num_prefilling": 0,
        "num_waiting": 0,
        "num_free_blocks": 9,
        "num_preemptions": 0,
        "num_recoveries": 0,
        "token_budget": 64,
    }
    return IterationRecord(**(plain | changes))


def stream(telemetry: Telemetry, name: str, *engines: tuple[float, str]) -> Deliveries:
    """One with a token at 11.0 s and the next at 11.3 s."""
    request = RequestInfo(name, "/v1/completions", "", True, 7, 1)
    deliveries = Deliveries()
    telemetry.on_request_start(request, 10.0, deliveries)
    deliveries.places += [(at_s, 0, engine) for at_s, engine in engines]
    deliveries.tokens += [(11.0, 1, 0, 1), (11.3, 1, 0, 1)]
    telemetry.on_finish(request, RequestOutcome(200, "length", 2, 0), 11.3)
    return deliveries


def missed(telemetry: Telemetry) -> dict[str, int]:
    found: dict[str, int] = telemetry.objectives()["gaps_missed"]
    return found


# The same 300 ms: engine a computes a prompt, b is busy with quick steps and then stands still.
PREFILL = [
    step(1, 10.95, 10.999),
    step(2, 11.0, 11.299, num_prefill_tokens=900, num_prefilling=1),
    step(3, 11.3, 11.31),
]
QUICK = [
    step(70, 10.98, 10.999),
    *[step(70 + n, 11.0 + 0.02 * n, 11.015 + 0.02 * n) for n in range(1, 4)],
    step(74, 11.28, 11.299),
    step(75, 11.30, 11.32),
]


def test_a_gap_is_explained_by_the_engine_on_which_its_stream_ran(tmp_path: Path) -> None:
    log = RecordLog(tmp_path, {})
    telemetry = Telemetry("tiny", KnownEngine(OBJECTIVE), log)
    stream(telemetry, "on a", (10.1, "a"))
    stream(telemetry, "on b", (10.1, "b"))
    telemetry.on_iterations(PREFILL, "a")
    assert missed(telemetry) == {"prefill": 1}  # that on b waits for b's own records
    telemetry.on_iterations(QUICK, "b")
    assert missed(telemetry) == {"prefill": 1, "scheduling": 1}
    telemetry.close()
    (gaps,) = tmp_path.glob("gaps-*.parquet")
    rows = {row["request_id"]: row for row in pq.read_table(gaps).to_pylist()}
    assert (rows["on a"]["engine"], rows["on a"]["step"]) == ("a", 2)
    assert (rows["on b"]["engine"], rows["on b"]["step"]) == ("b", 74)


def test_a_gap_in_which_the_stream_moved_is_the_move_s() -> None:
    telemetry = Telemetry("tiny", KnownEngine(OBJECTIVE))
    stream(telemetry, "moved", (10.1, "a"), (11.1, "b"))
    stream(telemetry, "moved before its first token", (10.1, "a"), (10.5, "b"))
    stream(telemetry, "moved after", (10.1, "b"), (11.4, "a"))
    telemetry.on_iterations(QUICK, "b")
    assert missed(telemetry) == {"move": 1, "scheduling": 2}


def test_records_that_died_with_their_engine_are_not_waited_for() -> None:
    telemetry = Telemetry("tiny", KnownEngine(OBJECTIVE))
    stream(telemetry, "on a", (10.1, "a"))
    telemetry.on_iterations(PREFILL[:2], "a")  # none behind the gap
    telemetry.on_iterations([step(1, 12.0, 12.01)], "b")
    assert missed(telemetry) == {}
    telemetry.on_iterations([step(2, 30.0, 30.01)], "b")
    assert missed(telemetry) == {"prefill": 1}


def test_counts_of_one_engine_are_not_taken_for_another_s() -> None:
    telemetry = Telemetry("tiny", KnownEngine(OBJECTIVE))
    for number in range(3):
        for engine, preemptions in (("a", 5), ("b", 2)):
            record = step(number, 10.0 + number, 10.1 + number, num_preemptions=preemptions)
            telemetry.on_iterations([record], engine)
    value = telemetry.metrics.registry.get_sample_value
    assert value("legato_num_preemptions_total", {"model_name": "tiny"}) == 7


def test_an_engine_that_has_gone_is_forgotten_and_an_idle_one_is_not() -> None:
    telemetry, now_s = Telemetry("tiny", KnownEngine(OBJECTIVE)), 1000.0
    for name in ("gone", "idle", "busy"):
        telemetry.on_iterations([step(1, 10.0, 10.1, num_recoveries=1)], name)
    telemetry.on_iterations([step(2, now_s, now_s + 0.1, num_recoveries=1)], "busy")
    telemetry.on_iterations([step(1, now_s, now_s + 0.1)], "new")
    telemetry.show_engines(FrontEngines([snapshot(name) for name in ("idle", "busy", "new")]))
    assert set(telemetry._iterations) == {"idle", "busy", "new"}
    telemetry.on_iterations([step(500, now_s, now_s + 0.2, num_recoveries=2)], "idle")
    value = telemetry.metrics.registry.get_sample_value
    assert value("legato_recoveries_total", {"model_name": "tiny"}) == 4
