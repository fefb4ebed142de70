"""What a step costs, beside the paper: Figures 3 to 6, Table 3 and the tile of section 4.3."""

from __future__ import annotations

import numpy as np

from actors.scheduling.cost.mix import Mix
from actors.scheduling.cost.model import CostModel
from app.simulate.hardware.deployments import load_model, operator_ms
from app.simulate.hardware.shapes import MODELS
from app.simulate.paper import published
from app.simulate.paper.published import PublishedRow

MATRICES = ("qkv", "out", "up", "down")
POWERS = (128, 256, 512, 1024, 2048, 4096, 8192)  # prompts of Figures 3 and 4


def cost_rows() -> list[PublishedRow]:
    """Rows of all figures that the cost models bear."""
    return [
        *objective_rows(),
        *throughput_rows(),
        *breakdown_rows(),
        *intensity_rows(),
        *linear_rows(),
        tile_row(),
    ]


def whole_prompts(model: CostModel, length: int, count: int = 1) -> Mix:
    """A step of `count` whole prompts."""
    mix = Mix()
    for _ in range(count):
        mix.add(0, length, model.attention_window)
    return mix


def decodes(model: CostModel, count: int, context: int) -> Mix:
    """A step of `count` decodes that see `context` tokens each."""
    mix = Mix()
    for _ in range(count):
        mix.add(context - 1, 1, model.attention_window)
    return mix


def linear_ms(model: str, tensor_ranks: int, num_tokens: int) -> float:
    """Milliseconds of the matrix products of all layers on A100, without other operators."""
    shape = MODELS[model]
    tokens, groups = operator_ms(shape, "a100", tensor_ranks)
    total = np.sum([groups[group] for group in MATRICES], axis=0)
    return shape.num_layers * float(np.interp(num_tokens, tokens, total))


def objective_rows() -> list[PublishedRow]:
    """Table 3: the strict objective is five times a step of 32 decodes at 4k."""
    rows = []
    for d in published.DEPLOYMENTS:
        model = load_model(d.model)
        step_s = model.latency_s(decodes(model, 32, 4096))
        quantity = "5 x step of 32 decodes at 4k, s"
        rows.append(PublishedRow("Table 3", d.label, quantity, 5 * step_s, d.strict_s))
    return rows


def throughput_rows() -> list[PublishedRow]:
    """Figure 3: decodes gain from batches, prompts do not.

    The text says "roughly linear" of Mistral-7B; the artifact measured Yi-34B.
    """
    rows = []
    mistral, yi = load_model("mistral-7b-a100"), load_model("yi-34b-a100-tp2")
    one_s = mistral.latency_s(decodes(mistral, 1, 1024))
    for batch in (8, 32):
        ours = batch * one_s / mistral.latency_s(decodes(mistral, batch, 1024))
        where = f"Mistral-7B, {batch} decodes at 1024"
        rows.append(PublishedRow("Figure 3", where, "throughput / of one", ours, batch))
    four = mistral.latency_s(whole_prompts(mistral, 1024, 4))
    ours = 4 * mistral.latency_s(whole_prompts(mistral, 1024)) / four
    rows.append(
        PublishedRow("Figure 3", "Mistral-7B, 4 prompts of 1024", "throughput / of one", ours, 1.0)
    )
    one_s = yi.latency_s(decodes(yi, 1, 1024))
    for batch in (8, 32, 128):
        ours = batch * one_s / yi.latency_s(decodes(yi, batch, 1024))
        theirs = batch * published.DECODE_MS[1] / published.DECODE_MS[batch]
        where = f"Yi-34B, {batch} decodes at 1024"
        rows.append(PublishedRow("Figure 3", where, "throughput / of one", ours, theirs))
    return rows


def breakdown_rows() -> list[PublishedRow]:
    """Figure 4: linear layers take most of the time, and prompts of 512 tokens nearly saturate."""
    rows = []
    model = load_model("mistral-7b-a100")
    mixes = {f"prompt of {n}": whole_prompts(model, n) for n in (512, 2048, 8192)}
    mixes |= {f"decode batch of {n}": decodes(model, n, 1024) for n in (1, 32)}
    for name, mix in mixes.items():
        step_s = model.latency_s(mix)
        linear_s = linear_ms("mistral-7b", 1, mix.num_tokens) / 1e3
        linear_s += model.last_s(mix.num_slices)
        attention_s = model.attention_s(mix)
        where = f"Mistral-7B, {name}"
        linear, attention = linear_s / step_s, attention_s / step_s
        share = published.LINEAR_SHARE
        rows += [
            PublishedRow("Figure 4", where, "linear / step", linear, share, "at least"),
            PublishedRow("Figure 4", where, "attention / step", attention),
            PublishedRow("Figure 4", where, "other / step", 1.0 - linear - attention),
        ]
    ratio = linear_ms("mistral-7b", 1, 128) / linear_ms("mistral-7b", 1, 1)
    rows.append(PublishedRow("Figure 4", "Mistral-7B", "linear, 128 tokens / 1 token", ratio, 1.0))
    measured = {n: n / ms for n, ms in published.PREFILL_MS.items()}
    size = published.SATURATING_PREFILL
    for name, label, theirs in (
        ("mistral-7b-a100", "Mistral-7B", None),
        ("yi-34b-a100-tp2", "Yi-34B", measured[size] / max(measured.values())),
    ):
        model = load_model(name)
        rates = {n: n / model.latency_s(whole_prompts(model, n)) for n in POWERS}
        ours = rates[size] / max(rates.values())
        quantity = f"prefill throughput, prompt of {size} / highest"
        rows.append(PublishedRow("Figure 4", label, quantity, ours, theirs))
    return rows


def intensity_rows() -> list[PublishedRow]:
    """Figure 5: FLOP per byte of LLaMA2-70B's matrices on four A100 by tokens.

    The critical intensity, at which fetching weights and computing take equally long, is read from
    the operator timings: the time of one token is all fetching, the slope all computing.
    """
    fetch_ms = linear_ms("llama2-70b", 4, 1)
    slope_ms = (linear_ms("llama2-70b", 4, 4096) - linear_ms("llama2-70b", 4, 2048)) / 2048
    critical_tokens = fetch_ms / slope_ms
    critical = intensity(round(critical_tokens))
    where = "LLaMA2-70B, 4 A100"
    rows = [
        PublishedRow("Figure 5", where, "critical intensity, FLOP/byte", critical),
        PublishedRow("Figure 5", where, "its tokens", critical_tokens),
    ]
    for num_tokens, name, bound in (
        (32, "decode batch of 32", "at most"),
        (512, "decodes and chunks, 512", "at least"),
        (2048, "prompt of 2048", "at least"),
    ):
        ours = intensity(num_tokens) / critical
        rows.append(
            PublishedRow("Figure 5", f"{where}, {name}", "intensity / critical", ours, 1.0, bound)
        )
    return rows


def intensity(num_tokens: int, model: str = "llama2-70b", tensor_ranks: int = 4) -> float:
    """FLOP per byte of memory traffic of one rank's matrices: weights, inputs and outputs."""
    shape = MODELS[model]
    inner = shape.intermediate / tensor_ranks
    heads = shape.heads * shape.head_dim / tensor_ranks
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim / tensor_ranks
    sides = (
        (shape.hidden, qkv),
        (heads, shape.hidden),
        (shape.hidden, 2 * inner if shape.gated else inner),
        (inner, shape.hidden),
    )
    weights = sum(rows * columns for rows, columns in sides)
    activations = sum(rows + columns for rows, columns in sides)
    return 2.0 * num_tokens * weights / (2.0 * (weights + num_tokens * activations))


def linear_rows() -> list[PublishedRow]:
    """Figure 6: linear layers of LLaMA2-70B by tokens and ranks, stagnant and then linear."""
    rows = []
    for ranks in (1, 2, 4, 8):
        for few, many, theirs in ((1, 128, 1.0), (128, 512, 1.0), (2048, 4096, 2.0)):
            ours = linear_ms("llama2-70b", ranks, many) / linear_ms("llama2-70b", ranks, few)
            where, quantity = f"LLaMA2-70B, TP {ranks}", f"linear, {many} / {few} tokens"
            rows.append(PublishedRow("Figure 6", where, quantity, ours, theirs))
    return rows


def tile_row() -> PublishedRow:
    """Section 4.3: one token past a tile's edge."""
    model = load_model("yi-34b-a100-tp2")
    past, whole = (model.latency_s(whole_prompts(model, n)) for n in (257, 256))
    return PublishedRow(
        "Section 4.3", "Yi-34B", "chunk of 257 / 256", past / whole, published.TILE_STEP
    )
