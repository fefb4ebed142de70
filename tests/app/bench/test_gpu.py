"""The GPU bench without a GPU: its parts do on CPU what they will do there."""

from __future__ import annotations

import json
import pickle
import weakref
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import typer
from typer.testing import CliRunner

pytest.importorskip("triton", reason="Triton is not installed: the GPU bench drives its kernels")

from actors.scheduling.events import Emit, Output
from app.bench.ceilings import Ceilings
from app.bench.engine.stage import LoadedStage
from app.bench.engine.steps import StepCase
from app.bench.gpu import sections
from app.bench.gpu.anatomy import BATCHES, SAMPLINGS, anatomy
from app.bench.gpu.capacity import CONTENDERS, CapacityRow, confirm, search_capacities
from app.bench.gpu.checks import CheckResult
from app.bench.gpu.command import SECTIONS, _jobs, command, run_jobs
from app.bench.gpu.live import LiveRun
from app.bench.gpu.report import GpuReport, GpuSections, write_parquet
from app.bench.gpu.steps import time_steps
from app.bench.gpu.timing import measure_ceilings
from app.bench.gpu.tokens import MODELS, check_tokens
from app.bench.gpu.worker import Add, Work
from app.bench.report import MeasurementError
from app.simulate.hardware.deployments import load_model
from app.simulate.run.simulation import scheduler_config
from app.simulate.workload.requests import Workload

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the stages whose steps are taken apart: nothing here depends on its size."""
    monkeypatch.setattr("app.bench.gpu.anatomy._VOCABULARY", 4096)


@pytest.fixture
def stage(tiny_model: Callable[..., Path]) -> LoadedStage:
    return LoadedStage(
        tiny_model("llama"), backend="torch", dtype="float32", threads=1, max_requests=4,
        kv_tokens=2048,
    )  # fmt: skip


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 2
    assert "no CUDA device here" in result.output


def test_the_host_can_be_measured_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.bench.gpu.anatomy.anatomy", partial(anatomy, num_steps=6))
    app, out = typer.Typer(), tmp_path / "report.json"
    app.command()(command)
    result = CliRunner().invoke(app, ["--only", "anatomy", "--out", str(out)])
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["anatomy"]
    assert {row["num_decodes"] for row in rows} == set(BATCHES)
    assert {row["sampling"] for row in rows} == set(SAMPLINGS)


def test_a_captured_step_is_one_launch_and_a_transfer_each_way() -> None:
    few, many = anatomy((1, 4), num_steps=6), anatomy((32,), num_steps=6)
    for row in (*few, *many):
        assert row.num_replays == 1
        assert row.num_operations == 2
        assert row.host_us > 0
        assert row.bytes_copied < 4096 + 128 * 80, "block tables stay on the device"


def test_the_host_s_work_grows_little_with_the_rows() -> None:
    """Rows are columns of arrays: of each, Python looks the request up and names it in the
    answer."""
    rows = 128 - 32
    for few, many in zip(anatomy((32,), num_steps=4), anatomy((128,), num_steps=4), strict=True):
        assert (many.num_replays, many.num_operations) == (few.num_replays, few.num_operations)
        assert many.bytes_copied - few.bytes_copied <= 16 * rows
        assert many.num_instructions <= 2 * few.num_instructions
        assert many.num_instructions - few.num_instructions <= 40 * rows


def context() -> typer.Context:
    return typer.Context(typer.main.get_command(typer.Typer(callback=lambda: None)))


def run_here(add: Add, work: Work) -> dict[str, Any]:
    return work(add) or {}


def test_what_was_found_is_kept_whatever_happens_next(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "report.json"
    report, seen = GpuReport(context(), {}, path), []

    def checks(add: Add) -> None:
        add("checks", CheckResult("good", "float32", 1e-7, 1e-5))

    def breaks(add: Add) -> None:
        seen.append(json.loads(path.read_text()))  # written before this began
        add("steps", CheckResult("half a section", "float32", 1e-7, 1e-5))
        raise MeasurementError("an illegal memory access was encountered")

    def after(add: Add) -> dict[str, float]:
        seen.append(json.loads(path.read_text()))
        return {"ceilings": 1.0}

    works: dict[str, Work] = {"checks": checks, "steps": breaks, "more": after}
    jobs = iter([(title, lambda work=work: work) for title, work in works.items()])  # type: ignore[misc]
    run_jobs(report, jobs, 0, run_here)
    first, second = seen
    assert [row["name"] for row in first["checks"]] == ["good"]
    assert [row["name"] for row in second["steps"]] == ["half a section"]
    assert "illegal memory access" in second["errors"]["steps"]
    assert json.loads(path.read_text())["ceilings"] == 1.0
    assert len(report.troubles) == 1
    assert len(pq.read_table(path.with_suffix(".parquet"))) == 2


def test_every_section_can_be_sent_to_the_process_that_computes() -> None:
    report = GpuReport(context(), {}, None)
    model = load_model("mistral-7b-a100")
    report.found["ceilings"] = asdict(Ceilings(1.0, 1.0))
    report.found["cost_models"] = {"it-triton": {"model": model.to_dict()}}
    capacity = asdict(CapacityRow("it", "orca", 50.0, 512, 16, 1.0, "none"))
    jobs = list(
        _jobs(
            report, SECTIONS, ["triton"], [Path("it")], (True, False), 1024, 16,
            1.0, [capacity],
        )
    )  # fmt: skip
    assert {title.partition(",")[0].partition(" of ")[0] for title, _ in jobs} == {
        *SECTIONS, "ceilings",
    }  # fmt: skip
    for _, make in jobs:
        assert pickle.loads(pickle.dumps(make()))


def test_nothing_begins_after_its_time_and_the_report_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = GpuReport(context(), {}, tmp_path / "report.json")
    now_s = iter([0.0, 30.0, 30.0, 599.0, *[700.0] * 9])
    monkeypatch.setattr("app.bench.gpu.command.time.monotonic", lambda: next(now_s, 700.0))
    done: list[str] = []
    jobs = [(name, lambda name=name: lambda add: done.append(name)) for name in ("a", "b")]  # type: ignore[misc, func-returns-value]
    run_jobs(report, iter(jobs), 10.0, run_here)
    assert done == ["a"]
    assert report.left_out == ["b"]


def test_a_stage_is_gone_before_the_next_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models of the size of one GPU's memory do not fit it."""
    alive: weakref.WeakSet[object] = weakref.WeakSet()
    most_alive = 0

    class Stage:
        def __init__(self, *arguments: object) -> None:
            nonlocal most_alive
            alive.add(self)
            most_alive = max(most_alive, len(alive))

        def close(self) -> None: ...

    monkeypatch.setattr(sections, "load_stage", Stage)
    monkeypatch.setattr("app.bench.gpu.steps.time_steps", lambda stage, ceilings: iter(()))
    monkeypatch.setattr("app.bench.gpu.capacity.confirm", lambda row, *rest: row)
    fitted = SimpleNamespace(to_dict=dict)
    monkeypatch.setattr(
        sections, "fit_cost_model", lambda stage, *rest, **more: (fitted, fitted, stage)
    )
    found = asdict(CapacityRow("it", "orca", 50.0, 512, 16, 1.0, "none"))
    rows: list[str] = []
    for _ in range(2):
        sections.run_steps(lambda name, row: None, Path("shape"), "triton", True, Ceilings(1, 1), 9)
        assert sections.run_fit(
            lambda name, row: None, Path("shape"), "triton", 9, {"other": {}}
        ) == {"cost_models": {"other": {}, "shape-triton": {"model": {}, "error": {}}}}
        model = replace(load_model("mistral-7b-a100"), name="it")
        sections.run_live(
            lambda name, row: rows.append(name), Path("shape"), "triton", 9, model, [found], 1.0
        )
    assert rows == ["live"] * 2
    assert most_alive == 1


def test_ceilings_are_rates_of_real_work() -> None:
    ceilings = measure_ceilings(CPU, num_bytes=1 << 20, matrix=64)
    assert ceilings.bandwidth_gb_s > 0
    assert ceilings.peak_gflop_s > 0


def test_tokens_of_the_plain_backend_are_all_equal() -> None:
    [row] = check_tokens("cpu", "torch", "float32", 16, list(MODELS)[1:2])
    assert row.passed
    assert row.num_equal == row.num_tokens > 0


def test_a_step_is_held_against_its_limit_and_target(stage: LoadedStage) -> None:
    targets = ((StepCase("decode 2 at 32", 2, 32), 1e9), (StepCase("chunk 16", chunk=16), 0.0))
    met, missed = time_steps(stage, Ceilings(10.0, 100.0), targets, repeats=2)
    assert met.met
    assert not missed.met
    assert met.bound == "memory"
    assert met.step_ms > 0
    assert met.ratio == met.step_ms / met.limit_ms


def test_a_live_run_serves_every_request(stage: LoadedStage) -> None:
    config = scheduler_config(
        load_model("mistral-7b-a100"), token_budget=32, max_requests=4, max_model_len=256,
        num_blocks=2048 // 16, tbt_s=10.0,
    )  # fmt: skip
    count = 6
    workload = Workload(
        np.linspace(0, 0.05, count), np.arange(5, 5 + 7 * count, 7), np.full(count, 4)
    )
    summary = LiveRun(stage.runner, config, workload).run(give_up_after_s=100)
    assert summary.num_completed == count
    assert summary.output_tokens_per_s > 0
    assert 0 < summary.tbt_p50 <= summary.tbt_p99
    assert summary.scheduling_delay_p50 >= 0
    assert summary.num_steps >= 4


def test_tokens_of_one_delivery_have_one_gap(stage: LoadedStage) -> None:
    """As their client sees them: zero gaps of accepted drafts would hide the others."""
    config = scheduler_config(
        load_model("mistral-7b-a100"), token_budget=32, max_requests=4, max_model_len=256,
        num_blocks=16, tbt_s=10.0,
    )  # fmt: skip
    run = LiveRun(stage.runner, config, Workload(np.zeros(1), np.full(1, 5), np.full(1, 4)))
    run._carry_out([Emit((Output(0, 0, (5,)),)), Emit((Output(0, 1, (6, 7, 8)),))])
    assert len(run.record.gaps_s) == 1
    assert list(run.record.num_output_tokens) == [4]


def test_stalls_cost_capacity_under_a_strict_objective(stage: LoadedStage) -> None:
    """Searched without a GPU; then each is tried on a stage."""
    few = [CONTENDERS[1], CONTENDERS[6]]
    model = load_model("mistral-7b-a100")
    orca, sarathi = search_capacities(model, (100.0,), 32, few)
    assert sarathi.simulated_qps > orca.simulated_qps > 0
    assert (orca.token_budget, sarathi.token_budget) == (512, None)
    assert sarathi.live_passed is None
    short = replace(model, kv_tokens=stage.kv_tokens, max_model_len=256)
    tried = confirm(replace(sarathi, simulated_qps=50.0), short, stage, 0.2)
    assert tried.live_passed is not None
    assert tried.live_tbt_p99_ms is not None


@pytest.mark.parametrize(("num_completed", "passed"), [(8, True), (7, False)])
def test_a_load_that_is_not_served_to_its_end_is_not_held(
    stage: LoadedStage, monkeypatch: pytest.MonkeyPatch, num_completed: int, passed: bool
) -> None:
    """Tails and medians know nothing of requests that have not run."""
    summary = SimpleNamespace(tbt_p99=0.01, scheduling_delay_p50=0.0, num_completed=num_completed)
    run = SimpleNamespace(run=lambda give_up_after_s: summary)
    monkeypatch.setattr("app.bench.gpu.capacity.LiveRun", lambda *given: run)
    row = CapacityRow("m", "sarathi", 100.0, 512, 16, 4.0, "")
    model = replace(load_model("mistral-7b-a100"), kv_tokens=stage.kv_tokens)
    assert confirm(row, model, stage, 2.0).live_passed is passed


def test_the_sections_name_failures_and_read_back(tmp_path: Path) -> None:
    sections = GpuSections()
    sections.add("checks", CheckResult("good", "float32", 1e-7, 1e-5))
    sections.add("checks", CheckResult("bad", "float32", 1e-3, 1e-5))
    assert sections.failures == ["bad"]
    assert [row["passed"] for row in sections.rows["checks"]] == [True, False]
    settings = {"backends": ["triton"]}
    write_parquet({"settings": settings, **sections.rows}, sections, tmp_path / "gpu.parquet")
    table = pq.read_table(tmp_path / "gpu.parquet")
    assert table.column("section").to_pylist() == ["checks", "checks"]
    assert json.loads(table.column("fields")[1].as_py())["error"] == 1e-3
    assert json.loads(table.schema.metadata[b"legato"]) == {"settings": settings}
