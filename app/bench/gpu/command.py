"""`legato bench gpu`: checks, tokens, kernel and step times, capacity; one dated report."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from app.bench.ceilings import Ceilings
from app.bench.engine.profile import fit_cost_model
from app.bench.engine.stage import LoadedStage
from app.bench.gpu.report import GpuSections, write_parquet
from app.bench.gpu.timing import measure_ceilings
from app.bench.report import make_report, publish, today
from app.bench.terminal import Json, Out, console
from app.paths import locate

SECTIONS = ("checks", "tokens", "kernels", "steps", "capacity")
SHAPES = (Path("configs/models/shapes/mistral-7b"), Path("configs/models/shapes/llama3-8b"))
REPORTS = Path("configs/hardware/reports")
# Block size each backend is measured with: flash-attn's smallest, and ours.
BLOCK_SIZES = {"triton": 16, "flash_attn": 256}


def command(
    context: typer.Context,
    only: Annotated[str, typer.Option(help=f"Some of: {', '.join(SECTIONS)}.")] = "",
    models: Annotated[
        list[Path] | None, typer.Option("--model", help="Folder with config.json; repeatable.")
    ] = None,
    backends: Annotated[str, typer.Option(help="Some of: triton, flash_attn.")] = "",
    kv_tokens: Annotated[int, typer.Option(min=1024, help="Of the stage's KV cache.")] = 400_000,
    capacity_requests: Annotated[
        int, typer.Option(min=16, help="Requests of a simulated probe.")
    ] = 512,
    live_s: Annotated[float, typer.Option(help="Live trial of each capacity; 0: none.")] = 20.0,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Prove and time the CUDA path on this GPU (tens of minutes).

    Without --out the report is named by GPU and date, in configs/hardware/reports; a Parquet file
    of its rows stands beside it.
    """
    if not torch.cuda.is_available():
        console.print("no CUDA device here: nothing to measure (see kernels/triton/README.md)")
        raise typer.Exit(2)
    chosen = _chosen(only, SECTIONS)
    usable = [b for b in _chosen(backends, tuple(BLOCK_SIZES)) if _loads(b)]
    shapes = [locate(shape) for shape in models or SHAPES]
    sections, device = GpuSections(), torch.device("cuda")
    ceilings = measure_ceilings(device)
    found: dict[str, Any] = {"ceilings": asdict(ceilings)}
    if "checks" in chosen:
        _run("checks", lambda: run_checks(sections, usable, device))
    if "tokens" in chosen:
        _run("tokens", lambda: run_tokens(sections, usable, "cuda"))
    if "kernels" in chosen:
        _run("kernels", lambda: _kernels(sections, usable, ceilings, device))
    for shape in shapes if {"steps", "capacity"} & set(chosen) else ():
        for backend in usable:
            _run(
                f"steps and capacity, {shape.name}, {backend}",
                lambda shape=shape, backend=backend: found.setdefault("cost_models", {}).update(  # type: ignore[misc]
                    _stage_sections(
                        *(sections, chosen, shape, backend, ceilings),
                        *(kv_tokens, capacity_requests, live_s),
                    )
                ),
            )
    resolved = {
        "backends": usable,
        "block_sizes": BLOCK_SIZES,
        "models": [shape.name for shape in shapes],
        "weights": "random, bfloat16",
    }
    report = make_report(context, {**found, **sections.rows}, resolved)
    path = out or REPORTS / f"{_title(torch.cuda.get_device_name())}.json"
    publish(report, as_json, path)
    write_parquet(report, sections, path.with_suffix(".parquet"))
    console.print(f"report: {path}")
    for failure in sections.failures:
        console.print(f"FAILED {failure}", markup=False)
    if sections.failures:
        raise typer.Exit(1)


def run_checks(sections: GpuSections, backends: Sequence[str], device: torch.device) -> None:
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
                sections.add("checks", checks.check_attention(case, backend, dtype, device))
            if name == "triton":
                for case in checks.SMALL_CASES:
                    for result in checks.check_rope(case, backend, dtype, device, case.pad is None):
                        sections.add("checks", result)
                for size in ((1, 4096), (300, 4096), (7, 14_336)):
                    for result in checks.check_elementwise(backend, dtype, device, *size):
                        sections.add("checks", result)
                for tokens in (1, 16, 64, 300):
                    for result in checks.check_quantized(dtype, device, tokens, (4096, 1024)):
                        sections.add("checks", result)


def run_tokens(sections: GpuSections, backends: Sequence[str], device: str) -> None:
    from app.bench.gpu.tokens import check_tokens

    for name in backends:
        for dtype in ("float32", "float16") if name == "triton" else ("float16",):
            for row in check_tokens(device, name, dtype, BLOCK_SIZES[name]):
                sections.add("tokens", row)


def _kernels(
    sections: GpuSections, backends: Sequence[str], ceilings: Ceilings, device: torch.device
) -> None:
    from app.bench.gpu.kernels import time_attention, time_others

    pairs = [(_backend(name), BLOCK_SIZES[name]) for name in backends]
    for row in time_attention(pairs, ceilings, device):
        sections.add("kernels", row)
    for row in time_others(_backend("triton"), ceilings, device):
        sections.add("kernels", row)


def _stage_sections(
    sections: GpuSections,
    chosen: Sequence[str],
    shape: Path,
    backend: str,
    ceilings: Ceilings,
    kv_tokens: int,
    capacity_requests: int,
    live_s: float,
) -> dict[str, Any]:
    """The cost models fitted on the way, by name."""
    from app.bench.gpu.capacity import capacities
    from app.bench.gpu.steps import time_steps

    cost_models = {}
    for graphs in (True, False) if "steps" in chosen else (True,):
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
        if "steps" in chosen:
            for row in time_steps(stage, ceilings):
                sections.add("steps", row)
        if "capacity" in chosen and graphs:
            name = f"{shape.name}-{backend}"
            model, error, _ = fit_cost_model(
                stage,
                name,
                "legato bench gpu",
                max_step_tokens=4096,
                num_mixed=80,
                repeats=2,
                tile=128,
            )
            cost_models[name] = {"model": model.to_dict(), "error": error.to_dict()}
            live = stage if live_s else None
            for found in capacities(model, (50.0, 100.0), capacity_requests, live, live_s):
                sections.add("capacity", found)
        stage.runner.close()
        del stage
        torch.cuda.empty_cache()
    return cost_models


def _backend(name: str) -> Any:
    from kernels.registry import resolve_backend

    return resolve_backend(name, "cuda", torch.bfloat16)


def _loads(name: str) -> bool:
    from kernels.registry import BackendError

    try:
        _backend(name)
    except BackendError as missing:
        console.print(f"left out: {missing}")
        return False
    return True


def _chosen(text: str, known: tuple[str, ...]) -> list[str]:
    chosen = [part.strip() for part in text.split(",") if part.strip()] or list(known)
    for part in chosen:
        if part not in known:
            raise typer.BadParameter(f"{part!r} is not one of {', '.join(known)}")
    return chosen


def _run(title: str, work: Callable[[], object]) -> None:
    begin_s = time.monotonic()
    with console.status(title):
        work()
    console.print(f"{title}: {time.monotonic() - begin_s:.0f} s")


def _title(gpu: str) -> str:
    return f"{gpu.lower().replace('nvidia ', '').replace(' ', '-')}-{today()}"
