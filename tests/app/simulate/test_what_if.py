"""Recorded traffic under other settings: what the log holds comes back, what is changed changes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from actors.engine.event_recorder import SCHEMA
from actors.scheduling.build import build_core
from actors.scheduling.config import ConfigError, SchedulerConfig
from actors.scheduling.cost.model import CostModel
from actors.scheduling.event_log import Recorder, Row, from_row, to_row
from actors.scheduling.events import Abort, Execute, Moved, Save, Submit
from actors.scheduling.request import Objective, Request, SamplingParams
from app.cli.main import app
from app.simulate.hardware.deployments import save_model
from app.simulate.run.record import RunRecord
from app.simulate.run.recorded import read_traffic
from app.simulate.run.replica import INFINITY, Replica
from app.simulate.what_if import what_if

MODEL = CostModel(
    "m",
    ((1, 0.010), (1024, 0.100), (4096, 0.400)),
    decode_kv_s=2e-8,
    kv_tokens=60_000,
    max_model_len=4096,
)
EOS = 2
COUNT, LEFT = 24, 7  # requests, and the one whose caller leaves


def config(**changes: Any) -> SchedulerConfig:
    base = SchedulerConfig(
        num_blocks=1000, token_budget=64, max_model_len=4096, cost_model=MODEL.to_dict(),
        drafter="none",  # the simulated runs have no drafts
    )  # fmt: skip
    return replace(base, **changes)


def requests() -> list[Request]:
    """Every third is a long prompt with an objective of its own, the others share a beginning."""
    made = []
    for number in range(COUNT):
        prompt = (300 + number,) * 900 if number % 3 == 0 else (7,) * 64 + (100 + number,) * 36
        sampling = SamplingParams(40, stop_token_ids=(EOS,))
        own = Objective(tbt_s=0.5, ttft_s=5.0) if number % 3 == 0 else Objective()
        made.append(Request(500 + number, prompt, sampling, 0.0, tenant="t", objective=own))
    return made


def token_of(request_id: int, position: int) -> int:
    """Every request stops of itself, after 10 to 29 tokens."""
    number = request_id - 500
    start = 900 if number % 3 == 0 else 100
    return EOS if position - start >= 9 + number % 20 else 50 + position % 40


def log_of(
    settings: SchedulerConfig, leavers: Sequence[tuple[int, float]] = ((LEFT, 0.26),)
) -> list[Row]:
    """The requests, one every 80 ms, on stages like `MODEL`; the log begins at 1000 s.
    leavers: (which, seconds after its arrival), in this order."""
    rows: list[Row] = []
    core = build_core(settings)
    recorder: Any = Recorder(core, rows.append)
    replica = Replica(recorder, MODEL, RunRecord(1000), host_s=0.001, token_of=token_of)
    replica.on_move = lambda move, now_s: replica.submit(
        Moved(move.move_id, len(move.blocks)), now_s
    )
    arrivals = [(1000.0 + 0.08 * k, request) for k, request in enumerate(requests())]
    aborts = [(arrivals[which][0] + after_s, 500 + which) for which, after_s in leavers]
    while True:
        next_s = arrivals[0][0] if arrivals else INFINITY
        abort_s = aborts[0][0] if aborts else INFINITY
        if min(replica.next_s, next_s, abort_s) == INFINITY:
            return rows
        if abort_s <= min(replica.next_s, next_s):
            abort_s, which = aborts.pop(0)
            replica.submit(Abort(which), abort_s)
        elif replica.next_s <= next_s:
            replica.advance()
        else:
            at_s, request = arrivals.pop(0)
            replica.submit(Submit(replace(request, arrival_s=at_s)), at_s)


def test_the_traffic_of_a_log_is_what_came() -> None:
    found = read_traffic(log_of(config()))
    assert [r.request_id for r in found.requests] == list(range(COUNT))
    assert found.record.arrival_s == pytest.approx([0.08 * k for k in range(COUNT)])
    sent = requests()
    assert [r.prompt for r in found.requests] == [r.prompt for r in sent]
    assert [(r.tenant, r.objective) for r in found.requests] == [
        (r.tenant, r.objective) for r in sent
    ]
    assert all(r.sampling.max_tokens == 40 for r in found.requests)
    lengths = [10 + k % 20 for k in range(COUNT)]
    assert 0 < len(found.outputs[LEFT]) < lengths[LEFT]
    lengths[LEFT] = len(found.outputs[LEFT])
    assert [len(tokens) for tokens in found.outputs] == lengths
    assert len(found.notes) == 1
    assert "1 requests were ended by their caller" in found.notes[0]


def test_requests_that_got_no_answer_are_not_completed() -> None:
    """One is left in its prefill; of a queue behind two places, two are left."""
    rows = log_of(config(max_requests=2), leavers=((0, 0.05), (9, 0.01), (10, 0.01)))
    traffic = read_traffic(rows)
    sent = [request.prompt for number, request in enumerate(requests()) if number not in (9, 10)]
    assert [request.prompt for request in traffic.requests] == sent
    assert [note[:58] for note in traffic.notes] == [
        "2 requests were left by their caller before their first st",
        "1 requests were left by their caller before their first to",
    ]
    found = what_if(rows, {"max_requests": 3})
    assert found.happened.num_completed == len(sent) - 1
    assert found.happened.goodput * found.happened.span_s == pytest.approx(len(sent) - 1)
    assert found.simulated.num_completed == len(sent)


def test_drafts_are_told_of_that_no_simulated_engine_has() -> None:
    rows = log_of(config())
    assert read_traffic(rows).notes[-1].startswith("1 requests were ended")
    at_s, event, instructions = from_row(rows[2])
    (execute,) = [one for one in instructions if isinstance(one, Execute)]
    (number, *_), *_ = execute.plan.slices
    drafted = Execute(replace(execute.plan, drafts=((number, (5,)),)))
    rows[2] = to_row(at_s, event, [drafted if one is execute else one for one in instructions])
    assert read_traffic(rows).notes[-1].startswith("1 steps verified drafts")


def test_the_same_settings_simulated_are_what_happened() -> None:
    """The same plans from the same core: also what the prefix cache gave, and the ends."""
    found = what_if(log_of(config()), {"slo.ttft_ms": 2000.0})
    happened, simulated = found.happened, found.simulated
    assert happened.num_completed == simulated.num_completed == COUNT
    assert happened.num_steps == pytest.approx(simulated.num_steps, abs=2)
    for name in ("ttft_p50", "ttft_p99", "tbt_p50", "tbt_p99", "tbt_max", "goodput",
                 "output_tokens_per_s", "mean_step_s"):  # fmt: skip
        assert getattr(simulated, name) == pytest.approx(getattr(happened, name), rel=0.03), name
    assert found.changed == found.simulated  # an objective that no part of these settings reads
    # Only requests without an objective of their own are judged by the new one.
    strict = what_if(log_of(config()), {"slo.ttft_ms": 1.0}).happened
    share = strict.goodput * strict.span_s / COUNT
    assert share == pytest.approx(1 / 3)


def test_what_if_is_what_the_other_settings_do() -> None:
    """The traffic of one log under the settings of another gives what the other shows."""
    chunked, whole = log_of(config()), log_of(config(policy="vllm"))
    foretold = what_if(chunked, {"policy": "vllm"}).changed
    happened = what_if(whole, {"policy": "sarathi"}).happened
    assert happened.tbt_max > 2 * what_if(chunked, {"policy": "vllm"}).happened.tbt_max
    for name in ("ttft_p50", "ttft_p99", "tbt_p99", "tbt_max", "output_tokens_per_s"):
        assert getattr(foretold, name) == pytest.approx(getattr(happened, name), rel=0.05), name


def test_a_log_of_an_engine_with_a_second_tier_is_simulated_without() -> None:
    rows = log_of(config(tier_ranks=1, tier_shared=True))
    assert any(isinstance(one, Save) for row in rows[1:] for one in from_row(row)[2])
    found = what_if(rows, {"policy": "vllm"})
    assert found.simulated.num_completed == found.changed.num_completed == COUNT
    note = "the second tier is not simulated: what it fetched is computed"
    assert note in found.notes
    assert note not in what_if(log_of(config()), {"policy": "vllm"}).notes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": "sarathi"}, "policy: the log was recorded with sarathi: nothing changes"),
        ({"budget": "adaptive", "token_budget": 99}, "token_budget: has no effect with the budget"),
        ({"policy": "sarathy"}, "unknown 'sarathy'; known: chunked_only"),
        ({"token_budget": 0}, "token_budget"),
        ({"budget": "profiled"}, "slo.tbt_ms: a profiled budget needs an objective"),
    ],
)
def test_a_change_that_means_nothing_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        what_if(log_of(config()), changes)
    assert message in str(caught.value)


def test_the_command_says_what_it_rests_on(tmp_path: Path) -> None:
    log, model = tmp_path / "events-1.parquet", tmp_path / "model.json"
    rows = log_of(config(cost_model=None))
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), log)
    save_model(MODEL, model)

    def replay(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["replay", str(log), *arguments])
        return result.exit_code, " ".join(result.output.split())

    assert replay() == (0, f"{log}: {len(rows)} events replayed, every instruction identical")
    for arguments, problem in (
        (["--policy", "vllm"], "carries no cost model: give one with --cost-model"),
        (["--cost-model", str(model)], "nothing is asked"),
        (["--json"], "nothing is asked"),
    ):
        status, text = replay(*arguments)
        assert status == 2
        assert problem in text
    asked = ["--max-requests", "200", "--policy", "vllm", "--cost-model", str(model)]
    status, text = replay(*asked)
    assert status == 0
    assert "happened" in text
    assert "cost model given, as the log carries none: m" in text
    runs = json.loads(CliRunner().invoke(app, ["replay", str(log), *asked, "--json"]).stdout)
    assert runs["runs"]["happened"]["num_completed"] == COUNT
