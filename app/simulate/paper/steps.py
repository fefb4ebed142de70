"""The paper's steps and single runs, simulated: Table 4, Figures 9 and 14, the artifact's steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from actors.scheduling.cost.mix import Mix
from actors.scheduling.cost.model import CostModel
from app.simulate.hardware.deployments import load_model
from app.simulate.paper import published
from app.simulate.paper.published import PublishedRow
from app.simulate.run.simulation import Deployment, scheduler_config, simulate
from app.simulate.workload.arrivals import poisson
from app.simulate.workload.requests import generate
from app.simulate.workload.specs import parse_lengths


def ablation_rows(
    num_requests: int = 128,
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    traces: Mapping[str, str] = MappingProxyType({}),
) -> list[PublishedRow]:
    """Table 4: each technique alone and both, Yi-34B, budget 512 (as the artifact ran it).

    traces: recorded lengths in the place of a dataset's published statistics.
    """
    rows = []
    model = load_model("yi-34b-a100-tp2")
    for dataset, qps in published.ABLATION_QPS.items():
        lengths = parse_lengths(traces.get(dataset, dataset))
        for policy, theirs in published.ABLATION.items():
            config = scheduler_config(model, policy=policy, token_budget=512)
            ttft, tbt = 0.0, 0.0
            for seed in seeds:
                workload = generate(poisson(qps), lengths, num_requests, seed=seed)
                summary = simulate(workload, Deployment(config, model)).summary()
                ttft += summary.ttft_p50 / len(seeds)
                tbt += summary.tbt_p99 / len(seeds)
            where = f"Yi-34B, {dataset}, {policy}"
            rows.append(PublishedRow("Table 4", where, "P50 TTFT, s", ttft, theirs[dataset][0]))
            rows.append(PublishedRow("Table 4", where, "P99 TBT, s", tbt, theirs[dataset][1]))
    return rows


def interference_rows() -> list[PublishedRow]:
    """Figure 9: what a prompt does to the decodes it shares an iteration with (Yi-34B)."""
    model = load_model("yi-34b-a100-tp2")
    rows, worst = [], 0.0
    for num_decodes, context in ((8, 1024), (32, 1024), (32, 4096)):
        alone_s = model.latency_s(Mix(num_decodes, num_decodes * context))
        for prompt in (4096, 8192):
            whole, chunked = (Mix(num_decodes, num_decodes * context) for _ in range(2))
            whole.add(0, prompt)
            chunked.add(prompt - 512 + num_decodes, 512 - num_decodes)
            where = f"Yi-34B, {num_decodes} decodes at {context}, prompt {prompt}"
            ratio = model.latency_s(whole) / alone_s
            worst = max(worst, ratio)
            rows.append(PublishedRow("Figure 9", where, "whole prompt / decode-only", ratio))
            rows.append(
                PublishedRow(
                    "Figure 9",
                    where,
                    "chunk of 512 / decode-only",
                    model.latency_s(chunked) / alone_s,
                )
            )
    rows.append(
        PublishedRow(
            "Figure 9", "largest", "whole prompt / decode-only", worst, published.INTERFERENCE
        )
    )
    return rows


def chunking_rows() -> list[PublishedRow]:
    """Figure 14: prefill time of a chunked prompt over that of a whole one (Yi-34B)."""
    model = load_model("yi-34b-a100-tp2")
    rows = []
    for prompt, measured in published.CHUNKING_MS.items():
        whole_s = chunked_s(model, prompt, prompt)
        for chunk in (512, 1024, 2048):
            theirs = measured[chunk] / measured[16384]
            ours = chunked_s(model, prompt, chunk) / whole_s
            rows.append(
                PublishedRow(
                    "Figure 14",
                    f"Yi-34B, prompt {prompt}, chunk {chunk}",
                    "time / whole",
                    ours,
                    theirs,
                )
            )
    return rows


def chunked_s(model: CostModel, prompt: int, chunk: int) -> float:
    """Seconds of a prompt alone, a chunk a step."""
    total_s = 0.0
    for start in range(0, prompt, chunk):
        mix = Mix()
        mix.add(start, min(chunk, prompt - start), model.attention_window)
        total_s += model.latency_s(mix)
    return total_s


def validation_rows() -> list[PublishedRow]:
    """The composed Yi-34B cost model against steps that the paper's artifact measured."""
    model = load_model("yi-34b-a100-tp2")
    rows = []
    for prompt, ms in published.PREFILL_MS.items():
        ours = chunked_s(model, prompt, prompt) * 1e3
        rows.append(PublishedRow("Artifact", f"Yi-34B, prefill of {prompt}", "step, ms", ours, ms))
    for batch, ms in published.DECODE_MS.items():
        ours = model.latency_s(Mix(batch, batch * 1024)) * 1e3
        rows.append(
            PublishedRow("Artifact", f"Yi-34B, {batch} decodes at 1024", "step, ms", ours, ms)
        )
    return rows
