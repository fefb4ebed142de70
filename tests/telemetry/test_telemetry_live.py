"""Events in, numbers out: metrics by name, logs as Parquet, traces with their bubbles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from actors.transport.messages import IterationRecord
from app.api.events import Deliveries, RequestInfo, RequestOutcome
from app.telemetry.live import Telemetry
from app.telemetry.prometheus import Metrics
from app.telemetry.records import ITERATIONS, RecordLog
from app.telemetry.trace import perfetto


def iteration(step: int, **changes: Any) -> IterationRecord:
    values: dict[str, Any] = {
        "step": step,
        "submitted_s": 10.0 + step,
        "done_s": 10.5 + step,
        "predicted_s": 0.2,
        "num_decode_tokens": 3,
        "num_prefill_tokens": 61,
        "num_requests": 4,
        "stages_s": ((10.0 + step, 10.2 + step), (10.3 + step, 10.5 + step)),
        "num_decoding": 3,
        "num_prefilling": 1,
        "num_waiting": 2,
        "num_free_blocks": 75,
        "num_preemptions": 0,
        "num_recoveries": 0,
        "token_budget": 64,
    }
    values.update(changes)
    return IterationRecord(**values)


def value(telemetry: Telemetry, name: str, **labels: str) -> float:
    telemetry.catch_up()
    found = telemetry.metrics.registry.get_sample_value(
        f"legato_{name}", {"model_name": "tiny", **labels}
    )
    assert found is not None, name
    return found


def test_a_request_and_its_tokens_are_counted() -> None:
    telemetry = Telemetry("tiny", 0.05)
    request = RequestInfo("r1", "/v1/completions", "", True, 7, 1)
    deliveries: Deliveries = []
    telemetry.on_request_start(request, 100.0, deliveries)
    deliveries += [(100.4, 1), (100.42, 1)]
    telemetry.catch_up()
    assert not deliveries  # counted once
    deliveries.append((100.52, 2))  # a stall of 100 ms, objective 50
    telemetry.on_finish(request, RequestOutcome(200, "stop", 4, 3, 0.25), 100.52)
    assert value(telemetry, "request_queue_time_seconds_sum") == pytest.approx(0.25)
    assert value(telemetry, "request_prefill_time_seconds_sum") == pytest.approx(0.15)
    assert value(telemetry, "request_decode_time_seconds_sum") == pytest.approx(0.12)
    assert value(telemetry, "time_to_first_token_seconds_sum") == 0.4000000000000057
    assert value(telemetry, "inter_token_latency_seconds_count") == 2
    assert value(telemetry, "tbt_objective_violations_total") == 1
    assert value(telemetry, "generation_tokens_total") == 4
    assert value(telemetry, "prefix_cache_hit_tokens_total") == 3
    assert value(telemetry, "request_success_total", finished_reason="stop") == 1
    telemetry.on_request_start(request, 200.0, [(200.5, 5)])
    rendered = telemetry.render().decode()  # counts what has only been noted so far
    assert "# TYPE legato_inter_token_latency_seconds histogram" in rendered
    assert 'legato_generation_tokens_total{model_name="tiny"} 9.0' in rendered


def test_iterations_give_gauges_bubbles_and_counts() -> None:
    telemetry = Telemetry("tiny", None)
    telemetry.num_blocks = 100
    telemetry.on_iterations([iteration(0), iteration(1, num_preemptions=2)])
    # A rebuilt scheduler starts at 0.
    telemetry.on_iterations([iteration(2, num_preemptions=0, num_recoveries=1)])
    assert value(telemetry, "kv_cache_usage_perc") == 0.25
    assert value(telemetry, "num_requests_running") == 4
    assert value(telemetry, "num_requests_waiting") == 2
    assert value(telemetry, "num_preemptions_total") == 2
    assert value(telemetry, "recoveries_total") == 1
    # Stage 1 was free when each step was submitted and began 0.3 s later, twice.
    assert abs(value(telemetry, "pipeline_bubble_seconds_total", stage="1") - 0.6) < 1e-9


def test_logs_are_parquet_with_the_settings_beside(tmp_path: Path) -> None:
    log = RecordLog(tmp_path, {"policy": "sarathi"}, rows_per_file=2)
    telemetry = Telemetry("tiny", None, log)
    for step in range(3):
        telemetry.on_iterations([iteration(step)])
    request = RequestInfo("r1", "/v1/completions", "t", False, 7, 1)
    telemetry.on_request_start(request, 1.0, [])
    telemetry.on_finish(request, RequestOutcome(200, "length", 4, 0), 2.5)
    telemetry.close()
    files = sorted(tmp_path.glob("iterations-*.parquet"))
    assert [pq.read_table(f).num_rows for f in files] == [2, 1]
    assert pq.read_table(files[0]).schema.equals(ITERATIONS)
    (requests,) = tmp_path.glob("requests-*.parquet")
    assert pq.read_table(requests).to_pylist()[0]["e2e_s"] == 1.5
    assert "sarathi" in next(tmp_path.glob("settings-*.json")).read_text()
    assert not list(tmp_path.glob("*.partial"))


def test_the_readme_lists_every_metric() -> None:
    readme = Path(__file__).resolve().parents[2] / "app/telemetry/README.md"
    assert Metrics("tiny").reference() in readme.read_text()


def test_record_fields_match_the_parquet_schema() -> None:
    assert tuple(ITERATIONS.names) == IterationRecord._fields


def test_trace_has_one_track_per_stage() -> None:
    events = perfetto([iteration(step)._asdict() for step in range(2)])["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert [(e["tid"], round(e["ts"]), round(e["dur"])) for e in slices] == [
        (1, 0, 200_000),
        (2, 300_000, 200_000),
        (1, 1_000_000, 200_000),
        (2, 1_300_000, 200_000),
    ]
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {"stage 0", "stage 1"}
