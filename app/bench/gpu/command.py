"""`legato bench gpu`: checks, tokens, kernel and step times, capacity; one dated report."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from app.bench.engine.stage import LoadedStage
from app.bench.gpu.report import Report, describe_gpu, write
from app.bench.gpu.timing import Ceilings, measure_ceilings

SECTIONS = ("checks", "tokens", "kernels", "steps", "capacity")
SHAPES = (Path("configs/models/shapes/mistral-7b"), Path("configs/models/shapes/llama3-8b"))
# Block size each backend is measured with: flash-attn's smallest, and ours.
BLOCK_SIZES = {"triton": 16, "flash_attn": 256}

_err = Console(stderr=True, highlight=False)


def bench_gpu(
    only: Annotated[str, typer.Option(help=f"Some of: {', '.join(SECTIONS)}.")] = "",
    models: Annotated[
        list[Path] | None, typer.Option("--model", help="Folder with config.json; repeatable.")
    ] = None,
    backends: Annotated[str, typer.Option(help="Some of: triton, flash_attn.")] = "",
    out: Annotated[Path, typer.Option()] = Path("configs/hardware/reports"),
    name: Annotated[str, typer.Option(help="Of the report; made from GPU and date.")] = "",
    kv_tokens: Annotated[int, typer.Option(min=1024)] = 400_000,
    capacity_requests: Annotated[int, typer.Option(min=16)] = 512,
    live_s: Annotated[float, typer.Option(help="Live trial of each capacity; 0: none.")] = 20.0,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Prove and time the CUDA path on this GPU, and write the report."""
    if not torch.cuda.is_available():
        _err.print("no CUDA device here: nothing to measure (see kernels/triton/README.md)")
        raise typer.Exit(2)
    sections = _chosen(only, SECTIONS)
    usable = [b for b in _chosen(backends, tuple(BLOCK_SIZES)) if _loads(b)]
    shapes = models or list(SHAPES)
    report = Report(
        {
            "backends": usable,
            "block_sizes": BLOCK_SIZES,
            "models": [shape.name for shape in shapes],
            "weights": "random, bfloat16",
            "kv_tokens": kv_tokens,
            "capacity_requests": capacity_requests,
            "live_s": live_s,
        }
    )
    device = torch.device("cuda")
    _run("ceilings", lambda: _ceilings(report, device))
    ceilings = Ceilings(**report.extra["ceilings"])
    if "checks" in sections:
        _run("checks", lambda: run_checks(report, usable, device))
    if "tokens" in sections:
        _run("tokens", lambda: run_tokens(report, usable, "cuda"))
    if "kernels" in sections:
        _run("kernels", lambda: _kernels(report, usable, ceilings, device))
    for shape in shapes if {"steps", "capacity"} & set(sections) else ():
        for backend in usable:
            _run(
                f"steps and capacity, {shape.name}, {backend}",
                lambda shape=shape, backend=backend: _stage_sections(  # type: ignore[misc]
                    report, sections, shape, backend, ceilings, kv_tokens, capacity_requests, live_s
                ),
            )
    title = name or _title(str(describe_gpu()["gpu"]))
    path = write(report, out, title)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    _err.print(f"report: {path}")
    for failure in report.failures:
        _err.print(f"FAILED {failure}")
    if report.failures:
        raise typer.Exit(1)


def run_checks(report: Report, backends: Sequence[str], device: torch.device) -> None:
    """Small and full cases in bfloat16, small ones in float32 too; elementwise and products."""
    from app.bench.gpu import checks

    for name in backends:
        backend = _backend(name)
        for dtype in (torch.float32, torch.bfloat16):
            cases = checks.SMALL_CASES + (checks.FULL_CASES if dtype == torch.bfloat16 else ())
            for case in cases:
                if name == "flash_attn" and (
                    dtype == torch.float32 or case.float8 or case.block_size % 256
                ):
                    continue
                report.add("checks", checks.check_attention(case, backend, dtype, device))
            if name == "triton":
                for case in checks.SMALL_CASES:
                    for result in checks.check_rope(case, backend, dtype, device, case.pad is None):
                        report.add("checks", result)
                for size in ((1, 4096), (300, 4096), (7, 14_336)):
                    for result in checks.check_elementwise(backend, dtype, device, *size):
                        report.add("checks", result)
                for tokens in (1, 16, 64, 300):
                    for result in checks.check_quantized(dtype, device, tokens, (4096, 1024)):
                        report.add("checks", result)


def run_tokens(report: Report, backends: Sequence[str], device: str) -> None:
    from app.bench.gpu.tokens import check_tokens

    for name in backends:
        for dtype in ("float32", "float16") if name == "triton" else ("float16",):
            for row in check_tokens(device, name, dtype, BLOCK_SIZES[name]):
                report.add("tokens", row)


def _ceilings(report: Report, device: torch.device) -> None:
    report.extra["ceilings"] = asdict(measure_ceilings(device))


def _kernels(
    report: Report, backends: Sequence[str], ceilings: Ceilings, device: torch.device
) -> None:
    from app.bench.gpu.kernels import time_attention, time_others

    pairs = [(_backend(name), BLOCK_SIZES[name]) for name in backends]
    for row in time_attention(pairs, ceilings, device):
        report.add("kernels", row)
    for row in time_others(_backend("triton"), ceilings, device):
        report.add("kernels", row)


def _stage_sections(
    report: Report,
    sections: Sequence[str],
    shape: Path,
    backend: str,
    ceilings: Ceilings,
    kv_tokens: int,
    capacity_requests: int,
    live_s: float,
) -> None:
    from app.bench.gpu.capacity import capacities, fit_cost_model
    from app.bench.gpu.steps import time_steps

    for graphs in (True, False) if "steps" in sections else (True,):
        stage = LoadedStage(
            shape,
            backend=backend,
            device="cuda",
            block_size=BLOCK_SIZES[backend],
            max_requests=128,
            max_model_len=8192,
            max_step_tokens=8192,
            kv_tokens=kv_tokens,
            cuda_graphs=graphs,
        )
        if "steps" in sections:
            for row in time_steps(stage, ceilings):
                report.add("steps", row)
        if "capacity" in sections and graphs:
            name = f"{shape.name}-{backend}"
            model, error, _ = fit_cost_model(stage, name, 4096, num_mixed=80)
            fits = report.extra.setdefault("cost_models", {})
            fits[name] = {"model": model.to_dict(), "error": error.to_dict()}
            live = stage if live_s else None
            for found in capacities(model, (50.0, 100.0), capacity_requests, live, live_s):
                report.add("capacity", found)
        stage.runner.close()
        del stage
        torch.cuda.empty_cache()


def _backend(name: str) -> Any:
    from kernels.registry import resolve_backend

    return resolve_backend(name, "cuda", torch.bfloat16)


def _loads(name: str) -> bool:
    from kernels.registry import BackendError

    try:
        _backend(name)
    except BackendError as missing:
        _err.print(f"left out: {missing}")
        return False
    return True


def _chosen(text: str, known: tuple[str, ...]) -> list[str]:
    chosen = [part.strip() for part in text.split(",") if part.strip()] or list(known)
    for part in chosen:
        if part not in known:
            raise typer.BadParameter(f"{part!r} is not one of {', '.join(known)}")
    return chosen


def _run(title: str, work: Callable[[], None]) -> None:
    begin = datetime.datetime.now(datetime.UTC)
    work()
    seconds = (datetime.datetime.now(datetime.UTC) - begin).total_seconds()
    _err.print(f"{title}: {seconds:.0f} s")
    sys.stderr.flush()


def _title(gpu: str) -> str:
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    return f"{gpu.lower().replace('nvidia ', '').replace(' ', '-')}-{date}"


def register(bench: typer.Typer) -> None:
    bench.command("gpu")(bench_gpu)
