"""The sections of `legato bench gpu`: each measures one thing and reports row by row."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from actors.scheduling.cost.model import CostModel
from app.bench.ceilings import Ceilings
from app.bench.engine.profile import fit_cost_model
from app.bench.engine.stage import LoadedStage
from app.bench.gpu.worker import Add

# Block size each backend is measured with: ours, and flash-attn 2.8's smallest, which holds whole
# tiles of FlashAttention-3.
BLOCK_SIZES = {"triton": 16, "flash_attn": 256}

OBJECTIVES_MS = (50.0,)


def run_anatomy(add: Add) -> None:
    """The host's time per step; needs no GPU."""
    from app.bench.gpu.anatomy import anatomy

    for row in anatomy():
        add("anatomy", row)


def run_checks(add: Add, part: str, name: str, device: torch.device) -> None:
    """One of the `parts_of` a backend's kernels."""
    from app.bench.gpu.check_list import list_checks, run_all

    run_all(partial(add, "checks"), list_checks(part, resolve(name), device))


def run_tokens(add: Add, name: str, device: str) -> None:
    """Greedy tokens of tiny models against transformers."""
    from app.bench.gpu.tokens import check_tokens

    for dtype in ("float32", "float16") if name == "triton" else ("float16",):
        for row in check_tokens(device, name, dtype, BLOCK_SIZES[name]):
            add("tokens", row)


def run_ceilings(add: Add, device: torch.device) -> dict[str, Any]:
    """What steps and kernels are held against."""
    from app.bench.gpu.timing import measure_ceilings

    return {"ceilings": asdict(measure_ceilings(device))}


def run_steps(
    add: Add, shape: Path, name: str, graphs: bool, ceilings: Ceilings, kv_tokens: int
) -> None:
    """Whole steps of one loaded model."""
    from app.bench.gpu.steps import time_steps

    stage = load_stage(shape, name, kv_tokens, graphs)
    try:
        for row in time_steps(stage, ceilings):
            add("steps", row)
    finally:
        stage.close()
        give_back()


def run_kernels(add: Add, name: str, ceilings: Ceilings, device: torch.device) -> None:
    """Single kernels; those beside attention are the same on every backend. Attention of hybrid
    batches also in one launch, where the backend can."""
    from app.bench.gpu.check_list import run_all
    from app.bench.gpu.kernels import time_attention, time_experts, time_others

    backend = resolve(name)
    timed = [("attention", partial(time_attention, backend, BLOCK_SIZES[name], ceilings, device))]
    if name == "triton":
        timed += [
            ("others", partial(time_others, backend, ceilings, device)),
            ("experts", partial(time_experts, backend, ceilings, device)),
        ]
    run_all(partial(add, "kernels"), timed)


def run_fit(
    add: Add, shape: Path, name: str, kv_tokens: int, before: Mapping[str, Any]
) -> dict[str, Any]:
    """All cost models by title, with their errors: those before, and the one fitted to this GPU's
    step times."""
    stage = load_stage(shape, name, kv_tokens, True)
    try:
        title = f"{shape.name}-{name}"
        model, error, _ = fit_cost_model(
            stage, title, "legato bench gpu", max_step_tokens=4096, num_mixed=80, repeats=2,
            tile=128,
        )  # fmt: skip
        fitted = {"model": model.to_dict(), "error": error.to_dict()}
        return {"cost_models": {**before, title: fitted}}
    finally:
        stage.close()
        give_back()


def run_capacity(add: Add, models: Mapping[str, Any], num_requests: int) -> None:
    """Every policy under an objective, by the simulator; needs no GPU."""
    from app.bench.gpu.capacity import search_capacities

    for fitted in models.values():
        model = CostModel.from_dict(fitted["model"])
        for row in search_capacities(model, OBJECTIVES_MS, num_requests):
            add("capacity", row)


def run_live(
    add: Add, shape: Path, name: str, kv_tokens: int, model: CostModel,
    rows: Sequence[Mapping[str, Any]], live_s: float,
) -> None:  # fmt: skip
    """The capacities found for this model, on the GPU."""
    from app.bench.gpu.capacity import CapacityRow, confirm

    stage = load_stage(shape, name, kv_tokens, True)
    try:
        for row in rows:
            if row["model"] == model.name and row["simulated_qps"] > 0:
                add("live", confirm(CapacityRow(**row), model, stage, live_s))
    finally:
        stage.close()
        give_back()


def run_peers(add: Add, shape: Path, name: str, kv_tokens: int) -> None:
    """Legato, then transformers, at the same loads."""
    from app.bench.gpu.peer import LOADS, compare

    stage = load_stage(shape, name, kv_tokens, True)
    for row in compare(shape, torch.device("cuda"), stage, LOADS):
        add("peers", row)


def load_stage(shape: Path, name: str, kv_tokens: int, graphs: bool) -> LoadedStage:
    return LoadedStage(
        shape, backend=name, device="cuda", block_size=BLOCK_SIZES[name], max_requests=128,
        max_model_len=8192, max_step_tokens=8192, kv_tokens=kv_tokens, cuda_graphs=graphs,
    )  # fmt: skip


def give_back() -> None:
    """Release the memory of a closed stage: the next one would not fit beside it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def resolve(name: str) -> Any:
    """A backend by name; of triton's two ways of a hybrid batch the one of two launches, because
    both are looked at."""
    from kernels.registry import resolve_backend
    from kernels.triton.backend import TritonBackend

    backend = resolve_backend(name, "cuda", torch.bfloat16)
    return TritonBackend(one_launch=False) if name == "triton" else backend
