"""`legato bench adapters`: what LoRA adapters cost a decode step, and running streams as one loads.

Steps with and without adapters take turns on one real stage in this process. The streams run on a
live engine of this machine. All adapters are random and of the same layers.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import save_file

from actors.scheduling.plan import StepShape
from app.bench.engine.stage import DEFAULT_SHAPE, LoadedStage
from app.bench.load.client import Job
from app.bench.report import MeasurementError, make_report, publish
from app.bench.studies.live_engine import local_engine, serve_jobs
from app.bench.terminal import Json, Out, console, output, table
from app.paths import locate

_CONTEXT = 128
_ATTENTION = ("self_attn.q_proj", "self_attn.v_proj")
_ALL = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
_LOAD_AFTER_S = 2.0


@dataclass(frozen=True, slots=True)
class StepRatio:
    """Medians of one decode of every stream, in milliseconds. ratio: of the steps side by side."""

    layers: str
    streams: int
    num_adapters: int
    base_ms: float
    adapters_ms: float
    ratio: float


@dataclass(frozen=True, slots=True)
class LoadGap:
    """longest_tbt_ms: of the streams while the adapter loaded; before_ms: in as long a time just
    before it."""

    streams: int
    load_ms: float
    longest_tbt_ms: float
    before_ms: float


def write_adapter(folder: Path, model: Path, rank: int, names: tuple[str, ...], seed: int) -> Path:
    """A random adapter of a Llama shape, as peft would save it."""
    config = json.loads((model / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    sizes = dict(zip(_ALL, [(hidden, q), (hidden, kv), (hidden, kv), (q, hidden)], strict=False))
    sizes |= dict.fromkeys(_ALL[4:6], (hidden, inner)) | {_ALL[6]: (inner, hidden)}
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name in names:
            prefix = f"base_model.model.model.layers.{layer}.{name}.lora_"
            for which, shape in (("A", (rank, sizes[name][0])), ("B", (sizes[name][1], rank))):
                drawn = torch.randn(shape, generator=generator) * 0.01
                tensors[f"{prefix}{which}.weight"] = drawn.to(torch.bfloat16)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    keys = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank}
    (folder / "adapter_config.json").write_text(json.dumps(keys))
    return folder


def step_ratios(
    model: Path, scratch: Path, streams: int, num_adapters: int, rank: int, threads: int, steps: int
) -> list[StepRatio]:
    stage = LoadedStage(
        model, threads=threads, max_requests=2 * streams, kv_tokens=4 * streams * _CONTEXT,
        max_adapters=num_adapters, max_adapter_rank=rank,
    )  # fmt: skip
    shape = StepShape(streams, streams * _CONTEXT)
    found = []
    for layers, names in (("q, v", _ATTENTION), ("all seven", _ALL)):
        for slot in range(num_adapters):
            folder = scratch / f"{layers}-{slot}"
            stage.runner.load_adapter(slot, write_adapter(folder, model, rank, names, slot))
        base_s: list[float] = []
        adapters_s: list[float] = []
        plain = stage.enter(shape)
        base_s += [stage.step(shape, plain) for _ in range(3)]
        stage.leave(plain)
        base_s.clear()
        for _ in range(steps // 4):  # in turn, a few at a time: machines drift
            for wanted, times in ((False, base_s), (True, adapters_s)):
                each = [1 + n % num_adapters for n in range(streams)] if wanted else []
                ids = stage.enter(shape, each)
                stage.step(shape, ids)
                times += [stage.step(shape, ids) for _ in range(4)]
                stage.leave(ids)
        base, adapted = statistics.median(base_s), statistics.median(adapters_s)
        found.append(
            StepRatio(layers, streams, num_adapters, 1e3 * base, 1e3 * adapted, adapted / base)
        )
    stage.close()
    return found


async def load_gap(model: Path, scratch: Path, streams: int, rank: int, tbt_ms: float) -> LoadGap:
    args = {
        "model": {"path": str(model), "load_format": "dummy", "dtype": "bfloat16"},
        "slo": {"tbt_ms": tbt_ms},
        "adapters": {"max_adapters": 2, "max_rank": rank},
    }
    folder = write_adapter(scratch / "loaded", model, rank, _ALL, 0)
    async with local_engine(args) as engine:
        from app.engine_client.adapters import AdapterEngine  # here: it imports Ray

        if not isinstance(engine, AdapterEngine):
            raise MeasurementError("the engine has no adapters")
        jobs = [Job(0.02 * n, 64, 600) for n in range(streams)]
        begin_s = time.perf_counter()
        running = asyncio.create_task(serve_jobs(engine, jobs, random.Random(0)))
        await asyncio.sleep(_LOAD_AFTER_S)
        loading_s = time.perf_counter() - begin_s
        await engine.load_adapter("loaded", str(folder))
        loaded_s = time.perf_counter() - begin_s
        traces = await running
    times = [trace.event_times_s for trace in traces]
    if not all(one and one[-1] > loaded_s for one in times):
        raise MeasurementError("nothing was measured: streams ended before the adapter was loaded")
    took_s = loaded_s - loading_s
    before_s = _longest(times, max(0.0, loading_s - took_s), loading_s)
    gap_s = _longest(times, loading_s, loaded_s)
    return LoadGap(streams, 1e3 * took_s, 1e3 * gap_s, 1e3 * before_s)


def _longest(times: list[list[float]], begin_s: float, end_s: float) -> float:
    """The longest gap that overlaps these seconds."""
    gaps = [
        after - before
        for one in times
        for before, after in pairwise(one)
        if after > begin_s and before < end_s
    ]
    return max(gaps, default=0.0)


def command(
    context: typer.Context,
    model: Annotated[Path, typer.Option(help="A Llama shape.")] = DEFAULT_SHAPE,
    streams: Annotated[int, typer.Option(min=1, help="That decode at a time.")] = 16,
    adapters: Annotated[int, typer.Option(min=1, help="In one step.")] = 16,
    rank: Annotated[int, typer.Option(min=1, help="Of every adapter.")] = 16,
    threads: Annotated[int, typer.Option(min=0, help="0: all cores.")] = 0,
    steps: Annotated[int, typer.Option(min=4, help="Of each kind.")] = 120,
    tbt_ms: Annotated[float, typer.Option(min=1, help="The streams' objective.")] = 100.0,
    live: Annotated[bool, typer.Option(help="Load one while streams run, too.")] = True,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """A decode step with adapters over the same without, and streams' gaps while one loads."""
    model = locate(model)
    if not (model / "config.json").exists():
        raise typer.BadParameter(f"no {model / 'config.json'}", param_hint="--model")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, console.status("steps"):
        ratios = step_ratios(model, Path(folder), streams, adapters, rank, threads, steps)
        results["steps"] = [asdict(ratio) for ratio in ratios]
        if live:
            gap = asyncio.run(load_gap(model, Path(folder), streams, rank, tbt_ms))
            results["load"] = asdict(gap)
    publish(make_report(context, results, {"rank": rank}), as_json, out)
    if not as_json:
        columns = ("layers", "streams", "adapters", "base, ms", "with adapters, ms", "ratio")
        rows = [
            (r.layers, str(r.streams), str(r.num_adapters), f"{r.base_ms:.2f}",
             f"{r.adapters_ms:.2f}", f"{r.ratio:.2f}")
            for r in ratios
        ]  # fmt: skip
        output.print(table(f"{model.name}: a decode step, rank {rank}", columns, rows))
        if live:
            output.print(
                f"an adapter loaded in {gap.load_ms:.0f} ms: longest gap of {streams} streams "
                f"{gap.longest_tbt_ms:.0f} ms, {gap.before_ms:.0f} in as long a time before"
            )
