"""Events in, numbers out: metrics by name, logs as Parquet, traces with their bubbles."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from actors.scheduling.request import Objective
from actors.transport.messages import IterationRecord
from app.api.events import Deliveries, RequestInfo, RequestOutcome, RequestTiming
from app.telemetry.live import KnownEngine, Telemetry
from app.telemetry.loop_lag import LoopLag
from app.telemetry.prometheus import HttpErrors, Metrics, reference, render
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
    telemetry = Telemetry("tiny", KnownEngine(Objective(0.05)))
    request = RequestInfo("r1", "/v1/completions", "", True, 7, 1)
    deliveries = Deliveries()
    telemetry.on_request_start(request, 100.0, deliveries)
    deliveries.tokens += [(100.4, 1, 0, 1), (100.42, 1, 0, 1)]
    telemetry.catch_up()
    assert not deliveries.tokens  # counted once
    deliveries.tokens.append((100.52, 2, 0, 1))  # a stall of 100 ms, objective 50
    telemetry.on_finish(request, RequestOutcome(200, "stop", 4, 3, 0.25), 100.52)
    assert value(telemetry, "request_queue_time_seconds_sum") == pytest.approx(0.25)
    assert value(telemetry, "request_prefill_time_seconds_sum") == pytest.approx(0.15)
    assert value(telemetry, "request_decode_time_seconds_sum") == pytest.approx(0.12)
    assert value(telemetry, "time_to_first_token_seconds_sum") == 0.4000000000000057
    assert value(telemetry, "inter_token_latency_seconds_count") == 2
    assert value(telemetry, "tbt_objective_kept_total") == 1
    assert value(telemetry, "generation_tokens_total") == telemetry.num_streamed() == 4
    assert value(telemetry, "prefix_cache_hit_tokens_total") == 3
    assert value(telemetry, "request_success_total", finished_reason="stop") == 1
    telemetry.on_request_start(request, 200.0, Deliveries([(200.5, 5, 0, 1)]))
    rendered = render([telemetry.metrics_now()]).decode()  # counts what has only been noted so far
    assert "# TYPE legato_inter_token_latency_seconds histogram" in rendered
    assert 'legato_generation_tokens_total{model_name="tiny"} 9.0' in rendered
    assert 'legato_tbt_objective_seconds{model_name="tiny"} 0.05' in rendered


def test_an_engine_that_all_clients_leave_without_another_step_is_at_rest() -> None:
    """As during a rebuild: no record of a step follows that would tell."""
    telemetry = Telemetry("tiny", KnownEngine(num_blocks=32))
    request = RequestInfo("r1", "/v1/completions", "", True, 7, 1)
    telemetry.on_request_start(request, 100.0, Deliveries())
    telemetry.on_iterations([iteration(3, num_waiting=2, num_free_blocks=24, holds_starts=True)])

    def shown() -> list[float | None]:
        telemetry.metrics_now()
        names = "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"
        return [value(telemetry, name) for name in (*names, "starts_held_back")]

    assert shown() == [iteration(3).num_decoding + iteration(3).num_prefilling, 2, 0.25, 1]
    telemetry.on_finish(request, RequestOutcome(200, "disconnect", 0, 0), 101.0)
    assert shown() == [0, 0, 0, 0]


def test_each_request_is_held_to_its_own_objective() -> None:
    """Two requests in the same steps; one asks for 50 ms, the other takes the deployment's 200."""
    telemetry = Telemetry("tiny", KnownEngine(Objective(0.2, 1.0)))
    strict = RequestInfo("r1", "/v1/completions", "", True, 7, 2, objective=Objective(0.05))
    usual = RequestInfo("r2", "/v1/completions", "", True, 7, 1)
    late = RequestInfo("r3", "/v1/completions", "", True, 7, 1)
    told: dict[str, Deliveries] = {}
    for request in (strict, usual, late):
        telemetry.on_request_start(request, 10.0, told.setdefault(request.request_id, Deliveries()))
    told["r1"].tokens += [
        (11.0, 1, 0, 1),
        (11.0, 1, 1, 1),
        (11.1, 1, 0, 1),
        (11.1, 1, 1, 1),
        (11.12, 1, 0, 1),
    ]
    told["r2"].tokens += [(11.0, 1, 0, 1), (11.1, 1, 0, 1), (11.12, 1, 0, 1)]
    told["r3"].tokens += [(11.5, 1, 0, 1)]
    busy = {"num_preemptions": 0, "predicted_s": None}
    steps = [
        iteration(n, done_s=done_s, stages_s=((begin_s, done_s),), **busy)
        for n, (begin_s, done_s) in enumerate([(10.9, 10.999), (11.0, 11.099), (11.1, 11.119)])
    ]
    telemetry.on_iterations(steps[:2])
    # The step that ended the gap is known, but a later one may have ended within it as well.
    assert telemetry.objectives() == {"gaps_kept": 3, "gaps_missed": {}}
    telemetry.on_iterations(steps[2:])
    assert telemetry.objectives() == {"gaps_kept": 3, "gaps_missed": {"prefill": 2}}
    assert value(telemetry, "tbt_objective_missed_total", cause="prefill") == 2
    outcome = RequestOutcome(200, "stop", 5, 0, 0.25)
    assert telemetry.on_finish(strict, outcome, 11.2) == RequestTiming(
        0.25, 1.0, pytest.approx(0.1), False
    )
    kept = telemetry.on_finish(usual, outcome, 11.2)
    assert kept == RequestTiming(0.25, 1.0, pytest.approx(0.1), True)
    assert telemetry.on_finish(late, outcome, 11.5) == RequestTiming(0.25, 1.5, 0.0, False)
    assert value(telemetry, "goodput_requests_total") == 1
    assert value(telemetry, "goodput_tokens_total") == 5


def test_failures_and_refusals_are_no_successes() -> None:
    telemetry = Telemetry("tiny")
    ends = [(200, "length"), (200, "disconnect"), (429, "overloaded"), (500, "server_error")]
    for status, reason in ends:
        request = RequestInfo("r1", "/v1/completions", "", True, 7, 1)
        telemetry.on_request_start(request, 1.0, Deliveries())
        telemetry.on_finish(request, RequestOutcome(status, reason, 0, 0), 9.0)
    rendered = render([telemetry.metrics_now()]).decode()
    assert value(telemetry, "request_success_total", finished_reason="stop") == 0
    assert rendered.count("legato_request_failure_total{") == 3
    assert value(telemetry, "request_success_total", finished_reason="length") == 1
    assert value(telemetry, "request_failure_total", status="429", reason="overloaded") == 1
    assert "_created" not in rendered


def test_refusals_are_no_fast_answers() -> None:
    """Nor short ones; a stream that its client left has a length, but no last token."""
    telemetry = Telemetry("tiny")
    refused, left, whole = (RequestInfo("r", "/v1/completions", "", True, 7, 1) for _ in range(3))
    for request, told, outcome in (
        (refused, [], RequestOutcome(429, "overloaded", 0, 0)),
        (left, [(2.0, 1, 0, 1)], RequestOutcome(200, "disconnect", 1, 0)),
        (whole, [(2.0, 1, 0, 1), (8.0, 4, 0, 1)], RequestOutcome(200, "stop", 5, 0)),
    ):
        telemetry.on_request_start(request, 1.0, Deliveries(told))
        telemetry.on_finish(request, outcome, 1.0 + 8.0 * bool(told))
    assert value(telemetry, "e2e_request_latency_seconds_count") == 1
    assert value(telemetry, "e2e_request_latency_seconds_sum") == 8.0
    assert value(telemetry, "request_generation_tokens_count") == 2
    assert value(telemetry, "request_generation_tokens_sum") == 6


def test_goodput_omits_aborted_streams_and_counts_those_without_objectives() -> None:
    telemetry = Telemetry("tiny")
    for outcome in (RequestOutcome(200, "disconnect", 4, 0), RequestOutcome(200, "length", 3, 0)):
        request = RequestInfo("r1", "/v1/completions", "", True, 7, 1)
        telemetry.on_request_start(request, 1.0, Deliveries([(1.5, 1, 0, 1), (9.0, 2, 0, 1)]))
        timing = telemetry.on_finish(request, outcome, 9.0)
        assert timing is not None
        assert timing.kept is None
    assert value(telemetry, "goodput_tokens_total") == 3
    assert value(telemetry, "tbt_objective_kept_total") == 0


def test_iterations_give_gauges_bubbles_and_counts() -> None:
    telemetry = Telemetry("tiny", KnownEngine(num_blocks=100))
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
    telemetry = Telemetry("tiny", log=log)
    for step in range(3):
        telemetry.on_iterations([iteration(step)])
    request = RequestInfo("r1", "/v1/completions", "t", False, 7, 1)
    telemetry.on_request_start(request, 1.0, Deliveries())
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
    readme = Path(__file__).resolve().parents[3] / "app/telemetry/README.md"
    for registry in (Metrics("tiny").registry, LoopLag().registry, HttpErrors({}).registry):
        assert reference(registry) in readme.read_text()


def test_the_dashboard_shows_metrics_that_exist() -> None:
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
    families = Metrics("tiny").registry.collect()
    names = {f"{family.name}{end}" for family in families for end in suffixes[family.type]}
    dashboard = Path(__file__).resolve().parents[3] / "configs/deploy/grafana.json"
    shown = set(re.findall(r"legato_\w+", dashboard.read_text()))
    assert shown
    assert shown <= names, shown - names


def test_the_dashboard_adds_up_replicas_of_which_a_read_shows_one() -> None:
    """As Serve's proxy passes it to any: the others' last values are found in a range."""
    dashboard = json.loads(
        (Path(__file__).resolve().parents[3] / "configs/deploy/grafana.json").read_text()
    )
    families = {family.name: family for family in Metrics("tiny").registry.collect()}
    assert "window" in {variable["name"] for variable in dashboard["templating"]["list"]}
    for target in (target for panel in dashboard["panels"] for target in panel["targets"]):
        text = target["expr"]
        assert text.startswith(("sum", "max by", "max(", "histogram_quantile(")), text
        for call, name in re.findall(r"(\w*) ?\((legato_(?!engine_)\w+)\{", text):
            is_gauge = name in families and families[name].type == "gauge"
            assert call in (("last_over_time",) if is_gauge else ("rate", "increase")), text
        for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
            assert label in " ".join(re.findall(r"by \(([^)]*)\)", text)), text


def test_record_fields_match_the_parquet_schema() -> None:
    assert tuple(ITERATIONS.names) == ("engine", *IterationRecord._fields)


def test_trace_has_a_process_per_engine_and_a_track_per_stage() -> None:
    rows = [{"engine": engine, **iteration(n)._asdict()} for n in range(2) for engine in "ba"]
    events = perfetto(rows)["traceEvents"]
    for process in (1, 2):
        own = [event for event in events if event["pid"] == process]
        slices = [event for event in own if event["ph"] == "X"]
        assert [(e["tid"], round(e["ts"]), round(e["dur"])) for e in slices] == [
            (1, 0, 200_000),
            (2, 300_000, 200_000),
            (1, 1_000_000, 200_000),
            (2, 1_300_000, 200_000),
        ]
        names = [event["args"]["name"] for event in own if event["ph"] == "M"]
        assert names == [" ab"[process], "stage 0", "stage 1"]


def test_models_of_one_address_share_each_metrics_description() -> None:
    both = [Telemetry("small"), Telemetry("large")]
    for number, telemetry in enumerate(both):
        telemetry.metrics.generated.inc(1 + number)
    rendered = render([telemetry.metrics_now() for telemetry in both]).decode()
    assert rendered.count("# TYPE legato_generation_tokens_total counter") == 1
    assert rendered.count("# TYPE legato_inter_token_latency_seconds histogram") == 1
    assert 'legato_generation_tokens_total{model_name="small"} 1.0' in rendered
    assert 'legato_generation_tokens_total{model_name="large"} 2.0' in rendered


def test_replicas_behind_one_address_have_series_of_their_own() -> None:
    lag = LoopLag()
    for replica in ("a1", "b2"):
        telemetry = Telemetry("small")
        telemetry.metrics.generated.inc(3)
        rendered = render([telemetry.metrics_now()], lag.registry, replica=replica).decode()
        lines = [line for line in rendered.splitlines() if not line.startswith("#")]
        assert (
            f'legato_generation_tokens_total{{model_name="small",replica="{replica}"}} 3.0' in lines
        )
        assert all(f'replica="{replica}"' in line for line in lines)
