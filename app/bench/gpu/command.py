"""`legato bench gpu`: prove and time the CUDA path, section by section, in one report."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from actors.scheduling.cost.model import CostModel
from app.bench.ceilings import Ceilings
from app.bench.gpu import sections
from app.bench.gpu.check_list import parts_of
from app.bench.gpu.report import GpuReport
from app.bench.gpu.sections import BLOCK_SIZES
from app.bench.gpu.worker import Add, Work, Worker
from app.bench.report import MeasurementError, today
from app.bench.terminal import Json, Out, console
from app.paths import locate

# In the order in which their answers matter: whether tokens are right and how long steps take,
# before the many kernels that the checks compile. Without --only the first six are run: what a
# first ten minutes on a GPU should answer.
UNASKED = ("anatomy", "tokens", "steps", "kernels", "fit", "checks")
SECTIONS = (*UNASKED, "capacity", "live", "peers")
WITHOUT_GPU = {"anatomy", "capacity"}  # also titles
SHAPES = (Path("configs/models/shapes/llama3-8b"),)
REPORTS = Path("configs/hardware/reports")

# Its title, and what runs in the process that computes; made when its turn comes, of what the jobs
# before it found, which may raise MeasurementError.
Job = tuple[str, Callable[[], Work]]


def command(
    context: typer.Context,
    only: Annotated[
        str, typer.Option(help=f"Some of: {', '.join(SECTIONS)}. Absent: the first six.")
    ] = "",
    models: Annotated[
        list[Path] | None, typer.Option("--model", help="Folder with config.json; repeatable.")
    ] = None,
    backends: Annotated[str, typer.Option(help="Some of: triton, flash_attn.")] = "",
    uncaptured: Annotated[
        bool, typer.Option("--uncaptured", help="Time steps launch by launch too.")
    ] = False,
    minutes: Annotated[
        float, typer.Option(min=0, help="Begin nothing after so many minutes; 0: no limit.")
    ] = 0.0,
    kv_tokens: Annotated[int, typer.Option(min=1024, help="Of the stage's KV cache.")] = 400_000,
    capacity_requests: Annotated[
        int, typer.Option(min=16, help="Requests of a simulated probe.")
    ] = 512,
    live_s: Annotated[float, typer.Option(min=1, help="Arrivals of a live trial.")] = 20.0,
    given: Annotated[
        Path | None, typer.Option(help="A report whose cost models and capacities are used.")
    ] = None,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Prove and time the CUDA path on this GPU.

    The report is written anew after every section and while it runs, and a section that ruins its
    process is followed by a fresh one: what was found is kept, and the rest still runs. Without
    --out it is named by GPU and date, in configs/hardware/reports; a Parquet file of its rows
    stands beside it. The section anatomy needs no GPU, nor does capacity, which searches for hours
    of cores: fit on the GPU, search anywhere with --given, and try what was found with
    `--only live --given`.
    """
    chosen = _chosen(only, SECTIONS) if only else list(UNASKED)
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not WITHOUT_GPU.issuperset(chosen):
        console.print(
            "no CUDA device here: nothing to measure but `--only anatomy` and `--only capacity` "
            "(see kernels/triton/README.md)"
        )
        raise typer.Exit(2)
    usable = [b for b in _chosen(backends, tuple(BLOCK_SIZES)) if on_gpu and _loads(b)]
    shapes = [locate(shape) for shape in models or SHAPES]
    resolved = {
        "only": chosen,
        "backends": usable,
        "block_sizes": BLOCK_SIZES,
        "models": [shape.name for shape in shapes],
        "weights": "random, bfloat16",
    }
    path = out or (REPORTS / f"{_title()}.json" if on_gpu else None)
    report = GpuReport(context, resolved, path)
    before = json.loads(given.read_text()) if given is not None else {}
    report.found["cost_models"] = before.get("cost_models", {})
    jobs = _jobs(
        report, chosen, usable, shapes, (False, True)[not uncaptured :], kv_tokens,
        capacity_requests, live_s, before.get("capacity", []),
    )  # fmt: skip
    worker = Worker()
    try:
        run_jobs(report, jobs, minutes, worker.run)
    finally:
        worker.close()
    report.publish(as_json)
    for trouble in report.troubles:
        console.print(f"FAILED {trouble}", markup=False)
    if report.troubles:
        raise typer.Exit(1)


def run_jobs(
    report: GpuReport,
    jobs: Iterator[Job],
    minutes: float,
    run: Callable[[Add, Work], dict[str, Any]],
) -> None:
    """Run one after another; an error is recorded and does not stop the others.

    run: does what needs the GPU in the process that holds it; the rest is done here.
    """
    begin_s = time.monotonic()
    for title, make in jobs:
        if minutes and time.monotonic() - begin_s > 60 * minutes:
            report.left_out.append(title)
            continue
        job_s = time.monotonic()
        try:
            with console.status(title):
                work = make()
                found = work(report.add) if title in WITHOUT_GPU else run(report.add, work)
                report.found |= found or {}
        except MeasurementError as error:
            report.errors[title] = str(error)
        except Exception as error:  # of any kind: keep what others found
            report.errors[title] = f"{type(error).__name__}: {error}"
        report.seconds[title] = round(time.monotonic() - job_s, 1)
        report.write()
        console.print(f"{title}: {report.seconds[title]:.0f} s")


def _jobs(
    report: GpuReport,
    chosen: Sequence[str],
    backends: Sequence[str],
    shapes: Sequence[Path],
    graphs: Sequence[bool],
    kv_tokens: int,
    num_requests: int,
    live_s: float,
    capacities: Sequence[dict[str, Any]],
) -> Iterator[Job]:
    """In order of importance. Backends lie inside sections: what is known of one is known of all
    before the next question is asked."""
    device = torch.device("cuda")
    if "anatomy" in chosen:
        yield "anatomy", lambda: sections.run_anatomy
    for name in backends if "tokens" in chosen else ():
        yield _job(f"tokens, {name}", sections.run_tokens, name=name, device="cuda")
    if not {"steps", "kernels"}.isdisjoint(chosen):
        yield _job("ceilings", sections.run_ceilings, device=device)
    for captured in graphs if "steps" in chosen else ():
        for shape in shapes:
            for name in backends:
                yield (
                    f"steps, {shape.name}, {name}{'' if captured else ', uncaptured'}",
                    partial(_steps, report, shape, name, captured, kv_tokens),
                )
    for name in backends if "kernels" in chosen else ():
        yield f"kernels, {name}", partial(_kernels, report, name, device)
    for shape in shapes if "fit" in chosen else ():
        for name in backends:
            yield f"fit, {shape.name}, {name}", partial(_fit, report, shape, name, kv_tokens)
    for name in backends if "checks" in chosen else ():
        for part in parts_of(name):
            title = f"checks of {part}, {name}"
            yield _job(title, sections.run_checks, part=part, name=name, device=device)
    if "capacity" in chosen:
        yield "capacity", partial(_capacity, report, num_requests)
    for shape in shapes if "live" in chosen else ():
        for name in backends:
            yield (
                f"live, {shape.name}, {name}",
                partial(_live, report, shape, name, kv_tokens, capacities, live_s),
            )
    for shape in shapes if "peers" in chosen else ():
        for name in backends:
            title = f"peers, {shape.name}, {name}"
            yield _job(title, sections.run_peers, shape=shape, name=name, kv_tokens=kv_tokens)


def _job(title: str, section: Callable[..., Any], **settings: Any) -> Job:
    return title, lambda: partial(section, **settings)


def _steps(report: GpuReport, shape: Path, name: str, captured: bool, kv_tokens: int) -> Work:
    return partial(
        sections.run_steps, shape=shape, name=name, graphs=captured, ceilings=_found(report),
        kv_tokens=kv_tokens,
    )  # fmt: skip


def _kernels(report: GpuReport, name: str, device: torch.device) -> Work:
    return partial(sections.run_kernels, name=name, ceilings=_found(report), device=device)


def _fit(report: GpuReport, shape: Path, name: str, kv_tokens: int) -> Work:
    before = report.found["cost_models"]
    return partial(sections.run_fit, shape=shape, name=name, kv_tokens=kv_tokens, before=before)


def _capacity(report: GpuReport, num_requests: int) -> Work:
    models = report.found["cost_models"]
    return partial(sections.run_capacity, models=models, num_requests=num_requests)


def _live(
    report: GpuReport, shape: Path, name: str, kv_tokens: int,
    capacities: Sequence[dict[str, Any]], live_s: float,
) -> Work:  # fmt: skip
    fitted = report.found["cost_models"].get(f"{shape.name}-{name}")
    rows = report.sections.rows.get("capacity") or capacities
    if fitted is None or not rows:
        raise MeasurementError("no capacities to try: `--only fit`, then capacity, or --given")
    return partial(
        sections.run_live, shape=shape, name=name, kv_tokens=kv_tokens,
        model=CostModel.from_dict(fitted["model"]), rows=rows, live_s=live_s,
    )  # fmt: skip


def _found(report: GpuReport) -> Ceilings:
    if "ceilings" not in report.found:
        raise MeasurementError("the ceilings could not be measured: nothing to hold times against")
    return Ceilings(**report.found["ceilings"])


def _loads(name: str) -> bool:
    from kernels.registry import BackendError

    try:
        sections.resolve(name)
    except BackendError as missing:
        console.print(f"left out: {missing}")
        return False
    return True


def _chosen(text: str, known: tuple[str, ...]) -> list[str]:
    asked = [part.strip() for part in text.split(",") if part.strip()] or list(known)
    for part in asked:
        if part not in known:
            raise typer.BadParameter(f"{part!r} is not one of {', '.join(known)}")
    return [part for part in known if part in asked]


def _title() -> str:
    gpu = torch.cuda.get_device_name().lower().replace("nvidia ", "").replace(" ", "-")
    return f"{gpu}-{today()}"
