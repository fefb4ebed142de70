"""`legato bench engine`: step times of one stage against what this machine's arithmetic allows.

The limit of a step is max(bytes / bandwidth, FLOPs / peak): weights and KV read once, every
multiply-add done at the rate the cores reach from registers. Both ceilings are measured among the
steps, because a shared machine's change within seconds. No Ray: the stage runs in this process.
"""

from __future__ import annotations

import operator
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from actors.scheduling.plan import StepShape
from actors.stage.models.config import DecoderConfig
from actors.stage.states import ROWS_OF_REQUEST
from actors.stage.weights.attention_names import attending_linear_shapes
from actors.stage.weights.names import linear_shapes
from app.bench.ceilings import Ceilings
from app.bench.engine.stage import BLOCK_SIZE, DEFAULT_SHAPE, LoadedStage
from app.bench.report import make_report, publish
from app.bench.terminal import Json, Out, console, output, progress, table
from app.paths import locate
from app.simulate.hardware.shapes import experts_touched
from kernels.cpu import library
from kernels.huge_pages import map_zeros

_READ_BYTES = 256 << 20
_WEIGHT_BYTES = {"none": 2.0, "int8": 1.0, "int4": 0.5, "w8a8": 1.0, "w4a8": 0.5}


@dataclass(frozen=True, slots=True)
class StepCase:
    """A hybrid step: `num_decodes` at `context` tokens and one prefill chunk after `prefix`."""

    name: str
    num_decodes: int = 0
    context: int = 256
    chunk: int = 0
    prefix: int = 0

    @property
    def shape(self) -> StepShape:
        prefills = ((self.prefix, self.chunk),) if self.chunk else ()
        return StepShape(self.num_decodes, self.num_decodes * self.context, prefills)


CASES = (
    StepCase("decode 1", 1),
    StepCase("decode 8", 8),
    StepCase("decode 32", 32),
    StepCase("decode 32, context 1536", 32, 1536),
    StepCase("prefill 512", chunk=512),
    StepCase("prefill 512 behind 1024", chunk=512, prefix=1024),
    StepCase("hybrid 480 + 32 decodes", 32, chunk=480),
    StepCase("hybrid 96 + 32 decodes", 32, chunk=96),
)
# Of the largest case, each request in whole blocks: with one stage for each format, more would not
# fit the memory of a small machine.
_KV_TOKENS = max(
    case.num_decodes * (case.context + 2 * BLOCK_SIZE) + case.prefix + case.chunk + BLOCK_SIZE
    for case in CASES
)


@dataclass(frozen=True, slots=True)
class StepTime:
    """One kind of step with one format of weights; `ratio` is time over limit."""

    quantization: str
    case: str
    step_ms: float
    limit_ms: float
    ratio: float
    bound: str  # "memory" or "compute"


def measure_ceilings(floats: torch.Tensor) -> Ceilings:
    """One sample of both: about 20 ms."""
    begin = time.perf_counter()
    library.stream_read(floats)
    read_s = time.perf_counter() - begin
    begin = time.perf_counter()
    flops = library.multiply_in_registers(20_000_000, 2 * library.num_threads())
    rate = flops / (time.perf_counter() - begin)
    return Ceilings(floats.numel() * 4 / read_s / 1e9, rate / 1e9)


def limit(stage: LoadedStage, case: StepCase, ceilings: Ceilings) -> tuple[float, str]:
    """(seconds, what binds): weights, KV and states read once, states written once, every
    multiply-add of matrices and attention at the peak. Of a mixture, the experts that tokens touch
    if they choose evenly."""
    config, tokens = stage.description, case.num_decodes + case.chunk
    num_slices = case.num_decodes + (1 if case.chunk else 0)
    pairs = case.num_decodes * case.context + case.chunk * (case.prefix + case.chunk / 2)
    head = config.hidden_size * config.vocab_size
    num_weights, flops = float(head), 2.0 * num_slices * head
    for layer in range(config.num_layers):
        read, used = _weights(config, layer, tokens)
        num_weights += read
        flops += 2.0 * tokens * used
        if not config.has_mixer(layer):
            flops += 4.0 * pairs * config.num_heads * config.at(layer).head_dim
    num_bytes = _WEIGHT_BYTES[stage.spec.quantization] * num_weights
    kv_tokens = case.num_decodes * case.context + case.prefix + case.chunk
    num_bytes += kv_tokens * stage.info.kv_block_bytes / stage.spec.block_size
    num_bytes += 2 * num_slices * stage.info.state_bytes / ROWS_OF_REQUEST
    return ceilings.limit_s(num_bytes, flops), ceilings.bound(num_bytes, flops)


def _weights(config: DecoderConfig, layer: int, tokens: int) -> tuple[float, float]:
    """Of a layer's matrices: weights that a step reads, and that a token passes."""
    has_experts = config.has_experts(layer)
    mixed = config.has_mixer(layer)
    if config.has_mlp(layer):
        shapes = linear_shapes(config.at(layer), has_experts, mixed)
    else:
        shapes = attending_linear_shapes(config, mixed)
    sizes = {name: out * into for name, ((out, into), _) in shapes.items()}
    prefixes = tuple(map(config.names.expert.format, range(config.num_experts)))
    routed = sum(size for name, size in sizes.items() if name.startswith(prefixes))
    others = sum(sizes.values()) - routed
    if not has_experts:
        return others, others
    one, chosen = routed / config.num_experts, config.experts_per_token
    touched = experts_touched(config.num_experts, chosen, tokens)
    return others + touched * one, others + chosen * one


def measure_steps(
    stages: Sequence[LoadedStage], cases: Sequence[StepCase], repeats: int
) -> tuple[Ceilings, list[StepTime]]:
    """Rounds over all stages and cases; medians of the rounds, of the ratios too."""
    floats = map_zeros(_READ_BYTES).view(torch.float32)  # on huge pages, like weights and KV cache
    floats += 1.0  # touched: untouched pages are all the same zero page
    times: dict[tuple[str, str], list[tuple[float, Ceilings]]] = {}
    for round_number in progress(range(repeats), "rounds"):
        for case in cases:
            for stage in stages:
                timed = _time(stage, case, floats)
                if round_number or repeats == 1:  # the first round warms caches and pages
                    times.setdefault((stage.spec.quantization, case.name), []).append(timed)
    ceiling = _median([ceilings for rounds in times.values() for _, ceilings in rounds])
    results = []
    for stage in stages:
        for case in cases:
            kind = stage.spec.quantization
            rounds = times[kind, case.name]
            steps_s = [step_s for step_s, _ in rounds]
            limits = [limit(stage, case, ceilings) for _, ceilings in rounds]
            limits_s = [limit_s for limit_s, _ in limits]
            bound = statistics.mode(bound for _, bound in limits)
            ratio = statistics.median(map(operator.truediv, steps_s, limits_s))
            step_ms, limit_ms = 1e3 * statistics.median(steps_s), 1e3 * statistics.median(limits_s)
            results.append(StepTime(kind, case.name, step_ms, limit_ms, ratio, bound))
    return ceiling, results


def _median(ceilings: Sequence[Ceilings]) -> Ceilings:
    return Ceilings(
        statistics.median(c.bandwidth_gb_s for c in ceilings),
        statistics.median(c.peak_gflop_s for c in ceilings),
    )


def _time(stage: LoadedStage, case: StepCase, floats: torch.Tensor) -> tuple[float, Ceilings]:
    """Medians of a few identical steps, and of ceilings sampled among them: both are slowed alike
    by other work on the machine."""
    ids = stage.enter(case.shape)
    stage.step(case.shape, ids)
    steps_s, ceilings = [], []
    for _ in range(5):
        ceilings.append(measure_ceilings(floats))
        steps_s += [stage.step(case.shape, ids) for _ in range(1 if case.chunk else 3)]
    stage.leave(ids)
    return statistics.median(steps_s), _median(ceilings)


def command(
    context: typer.Context,
    model: Annotated[
        Path, typer.Option(callback=locate, help="A folder with config.json.")
    ] = DEFAULT_SHAPE,
    quantization: Annotated[
        str, typer.Option(help="none, int8, int4, w8a8, w4a8, or several: none,int8,int4.")
    ] = "none",
    backend: Annotated[str, typer.Option(help="cpu or torch.")] = "cpu",
    threads: Annotated[int, typer.Option(min=0, help="0: all cores.")] = 0,
    repeats: Annotated[
        int, typer.Option(min=1, help="Rounds over all steps; the first one warms up.")
    ] = 5,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Step time over batch, context and chunk, against the arithmetic limit of this machine."""
    kinds = quantization.split(",")
    if unknown := sorted(set(kinds) - set(_WEIGHT_BYTES)):
        raise typer.BadParameter(f"unknown {unknown[0]!r}", param_hint="--quantization")
    model = locate(model)
    if not (model / "config.json").exists():
        raise typer.BadParameter(f"no {model / 'config.json'}", param_hint="--model")
    threads = threads or library.num_threads()
    with console.status("loading"):
        stages = [
            LoadedStage(
                model, quantization=kind, backend=backend, threads=threads, kv_tokens=_KV_TOKENS
            )
            for kind in kinds
        ]
    ceilings, results = measure_steps(stages, CASES, repeats)
    found = {"ceilings": asdict(ceilings), "results": [asdict(r) for r in results]}
    resolved = {"backend": stages[0].info.backend, "threads": threads}
    publish(make_report(context, found, resolved), as_json, out)
    if not as_json:
        _print(model.name, ceilings, results)


def _print(model: str, ceilings: Ceilings, results: Sequence[StepTime]) -> None:
    columns = ("weights", "step", "bound", "ms", "limit ms", "ratio", "speed-up")
    first = {r.case: r.step_ms for r in results if r.quantization == results[0].quantization}
    rows = []
    for r in results:
        weights = "bf16" if r.quantization == "none" else r.quantization
        times = (f"{r.step_ms:.2f}", f"{r.limit_ms:.2f}", f"{r.ratio:.2f}")
        rows.append((weights, r.case, r.bound, *times, f"{first[r.case] / r.step_ms:.2f}"))
    output.print(table(f"{model}, {ceilings}", columns, rows, num_words=3))
