"""From published operator timings to the cost model of a whole deployment.

A deployment is a model shape, a device, a tensor-parallel degree, a number of pipeline stages and
two networks (inside a stage, between stages). `compose` sums the operators of one stage's layers.
A shape that was never profiled borrows the closest profiled one, each matrix scaled by its size:
both the memory floor (weights) and the compute above it grow in that proportion.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from actors.scheduling.cost_model import CostModel

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "hardware"

# Share of a device's memory that holds weights and KV, as serving systems set it by default, and
# what activations take of it.
MEMORY_SHARE, ACTIVATION_BYTES = 0.9, 2e9


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What decides a transformer's cost. profiled: the layer shape whose timings stand in."""

    name: str
    num_layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    profiled: str
    gated: bool = True
    all_reduces: int = 2  # per layer; 1 where attention and MLP run in parallel
    window: int = 0
    max_model_len: int = 16384

    @property
    def matrices(self) -> dict[str, float]:
        """Weights per layer by operator group."""
        return {
            "qkv": self.hidden * (self.heads + 2 * self.kv_heads) * self.head_dim,
            "out": self.heads * self.head_dim * self.hidden,
            "up": self.hidden * self.intermediate * (2 if self.gated else 1),
            "down": self.intermediate * self.hidden,
        }

    @property
    def weight_bytes(self) -> float:
        """All weights at two bytes."""
        return 2.0 * (self.num_layers * sum(self.matrices.values()) + 2 * self.vocab * self.hidden)

    @property
    def kv_bytes_per_token(self) -> float:
        return 4.0 * self.num_layers * self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator. Where attention was not profiled, A100's is scaled by the two ratios."""

    name: str
    memory_bytes: float
    attention_compute: float = 1.0  # times slower than an A100 at matrix products
    attention_memory: float = 1.0  # times slower at reading memory


@functools.cache
def _read(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((CONFIGS / "operators" / f"{name}.json").read_text("utf-8"))
    return data


# The ratios are those of the profiled linear layers (Llama-2-70B, TP 4): 4096 tokens and 1 token.
DEVICES = {
    "a100": Device("a100", 80e9),
    "a40": Device("a40", 48e9, attention_compute=2.09, attention_memory=2.57),
}

MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("mistral-7b", 32, 4096, 14336, 32, 8, 128, 32000, "llama-3-8b", window=4096),
        ModelShape("yi-34b", 60, 7168, 20480, 56, 8, 128, 64000, "codellama-34b"),
        ModelShape("llama2-70b", 80, 8192, 28672, 64, 8, 128, 32000, "llama-2-70b"),
        ModelShape(
            "falcon-180b",
            80,
            14848,
            59392,
            232,
            8,
            64,
            65024,
            "llama-2-70b",
            gated=False,
            all_reduces=1,
        ),
    )
}


# ---- networks -------------------------------------------------------------------------

# Commodity Ethernet was not profiled: 100 Gb/s at 80 % and a latency typical of TCP transports.
ETHERNET_BYTES_PER_S, ETHERNET_LATENCY_S = 10e9, 100e-6


def all_reduce_s(network: str, ranks: int, num_bytes: Sequence[float]) -> list[float]:
    """Seconds of one all-reduce of each size. "ethernet:K": K ranks a node, nodes by Ethernet."""
    if ranks == 1:
        return [0.0 for _ in num_bytes]
    if network.startswith("ethernet:"):
        per_node = int(network.split(":")[1])
        inside = all_reduce_s("a100-pairwise-nvlink", per_node, num_bytes)
        ring = 2.0 * (ranks - 1) / ranks
        return [
            s + 2 * ETHERNET_LATENCY_S + ring * b / ETHERNET_BYTES_PER_S
            for s, b in zip(inside, num_bytes, strict=True)
        ]
    table = _read("networks")[network].get("all_reduce", {}).get(f"{ranks}/{ranks}")
    if table is None:
        raise ValueError(f"no published all-reduce of {ranks} ranks over {network}")
    return [_interpolate(table, b) for b in num_bytes]


def send_s(network: str, num_bytes: float) -> float:
    """Seconds to send one message between stages."""
    if network == "ethernet":
        return ETHERNET_LATENCY_S + num_bytes / ETHERNET_BYTES_PER_S
    return _interpolate(_read("networks")[network]["send_recv"]["2/2"], num_bytes)


def _interpolate(table: dict[str, list[float]], num_bytes: float) -> float:
    """Linear between the measured sizes, and beyond them at the last slope."""
    sizes, ms = table["bytes"], table["ms"]
    if num_bytes > sizes[-1]:
        slope = (ms[-1] - ms[-4]) / (sizes[-1] - sizes[-4])
        return (ms[-1] + slope * (num_bytes - sizes[-1])) / 1e3
    return float(np.interp(num_bytes, sizes, ms)) / 1e3


# ---- composition ----------------------------------------------------------------------


def compose(
    model: str,
    device: str,
    tensor_ranks: int,
    num_stages: int,
    *,
    network: str = "a100-pairwise-nvlink",
    link: str = "a100-pairwise-nvlink",
    name: str = "",
) -> CostModel:
    """The cost model of `model` on num_stages x tensor_ranks devices.

    Raises ValueError for what has no published timings, and if the weights do not fit.
    """
    for kind, name_, known in (("model", model, MODELS), ("device", device, DEVICES)):
        if name_ not in known:
            raise ValueError(f"unknown {kind} {name_!r}; known: {', '.join(sorted(known))}")
    shape, target = MODELS[model], DEVICES[device]
    data = _read(device)["layers"][shape.profiled]
    layers = -(-shape.num_layers // num_stages)
    tokens, layer_s = _layer_seconds(shape, data, tensor_ranks)
    sizes = [2.0 * n * shape.hidden for n in tokens]
    collective_s = [
        shape.all_reduces * layers * s for s in all_reduce_s(network, tensor_ranks, sizes)
    ]
    total = [layers * s + c for s, c in zip(layer_s, collective_s, strict=True)]
    kv_tokens = kv_capacity_tokens(shape, target, tensor_ranks * num_stages)
    cpu = _read("a100")["cpu"]["1" if tensor_ranks == 1 else "many"]
    attention = _attention(shape, target, tensor_ranks, layers)
    batch_s = attention.pop("decode_batch_s")
    base = CostModel(
        name=name or f"{model}-{device}-tp{tensor_ranks}-pp{num_stages}",
        source=_read(device)["source"],
        num_stages=num_stages,
        tensor_ranks=tensor_ranks,
        overhead_s=cpu["overhead_s"] + batch_s,
        per_request_s=cpu["per_request_s"],
        tokens_s=_edges(tokens, total),
        transfer_s=_sends(shape, link) if num_stages > 1 else (),
        last_stage_s=_vocabulary(shape, data, tensor_ranks),
        attention_window=shape.window,
        tile_tokens=128,
        kv_tokens=kv_tokens,
        max_model_len=shape.max_model_len,
    )
    return CostModel.from_dict({**base.to_dict(), **attention})


def kv_capacity_tokens(shape: ModelShape, device: Device, num_devices: int) -> int:
    """KV tokens that fit beside the weights. Raises ValueError if the weights do not fit."""
    room = num_devices * (MEMORY_SHARE * device.memory_bytes - ACTIVATION_BYTES)
    free = room - shape.weight_bytes
    if free <= 0:
        raise ValueError(f"{shape.name} does not fit on {num_devices} x {device.name}")
    return int(free / shape.kv_bytes_per_token)


def _layer_seconds(
    shape: ModelShape, data: dict[str, Any], tensor_ranks: int
) -> tuple[list[int], list[float]]:
    """Seconds of one layer's linear and element-wise operators by token count."""
    profiled = data["shape"]
    if str(tensor_ranks) not in data["ms"]:
        raise ValueError(f"no published timings with {tensor_ranks} tensor ranks")
    table = data["ms"][str(tensor_ranks)]
    head_dim = profiled["hidden"] // profiled["heads"]
    reference = ModelShape(
        "profiled",
        1,
        profiled["hidden"],
        profiled["intermediate"],
        profiled["heads"],
        profiled["kv_heads"],
        head_dim,
        1,
        "",
    ).matrices
    scale = {group: size / reference[group] for group, size in shape.matrices.items()}
    scale["other"] = shape.hidden / profiled["hidden"]
    tokens = [int(n) for n in table["tokens"]]
    seconds = [
        sum(scale[group] * table[group][i] for group in scale) / 1e3 for i in range(len(tokens))
    ]
    return tokens, np.maximum.accumulate(seconds).tolist()


def _edges(tokens: Sequence[int], seconds: Sequence[float]) -> tuple[tuple[int, float], ...]:
    """Knots with tile steps as jumps: what was measured just past an edge holds from there on."""
    knots = []
    for n, s in zip(tokens, seconds, strict=True):
        past_edge = n > 128 and n % 128 == 8
        knots.append((n - 7 if past_edge else n, round(s, 7)))
    return tuple(knots)


def _attention(
    shape: ModelShape, device: Device, tensor_ranks: int, layers: int
) -> dict[str, float]:
    """Attention coefficients of one stage, from those of the profiled head counts."""
    profiled = _read("a100")["attention"]
    heads = shape.heads * shape.head_dim / tensor_ranks
    query = heads / (profiled["heads_per_rank"] * profiled["head_dim"]) * device.attention_compute
    kv_heads = max(1.0, shape.kv_heads / tensor_ranks) * shape.head_dim
    memory = kv_heads / (profiled["kv_heads_per_rank"] * profiled["head_dim"])
    memory *= device.attention_memory
    return {
        "decode_batch_s": layers * profiled["decode_batch_s"],
        "prefill_slice_s": layers * profiled["prefill_slice_s"],
        "prefill_kv_s": layers * profiled["prefill_kv_s"] * memory,
        "prefill_pair_s": layers * profiled["prefill_pair_s"] * query,
        "prefill_square_s": layers * profiled["prefill_square_s"] * query,
        "decode_slice_s": layers * profiled["decode_slice_s"],
        "decode_kv_s": layers * profiled["decode_kv_s"] * memory,
    }


def _sends(shape: ModelShape, link: str) -> tuple[tuple[int, float], ...]:
    marks = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384)
    times = np.maximum.accumulate([send_s(link, 2.0 * n * shape.hidden) for n in marks])
    return tuple((n, round(float(s), 7)) for n, s in zip(marks, times, strict=True))


def _vocabulary(
    shape: ModelShape, data: dict[str, Any], tensor_ranks: int
) -> tuple[tuple[int, float], ...]:
    """The output projection by sampled rows: the profiled down projection, scaled by size."""
    table, profiled = data["ms"][str(tensor_ranks)], data["shape"]
    ratio = shape.vocab * shape.hidden / (profiled["intermediate"] * profiled["hidden"])
    points = [
        (n, ms * ratio / 1e3)
        for n, ms in zip(table["tokens"], table["down"], strict=True)
        if n <= 256
    ]
    heights = np.maximum.accumulate([s for _, s in points])
    return _edges([n for n, _ in points], heights.tolist())


# ---- the paper's deployments ----------------------------------------------------------

PAPER = {
    "mistral-7b-a100": ("mistral-7b", "a100", 1, 1, "a100-pairwise-nvlink", ""),
    "yi-34b-a100-tp2": ("yi-34b", "a100", 2, 1, "a100-pairwise-nvlink", ""),
    "llama2-70b-a40-tp4-pp2": ("llama2-70b", "a40", 4, 2, "a100-pairwise-nvlink", "a40"),
    "falcon-180b-a100-tp4-pp2": ("falcon-180b", "a100", 4, 2, "a100-pairwise-nvlink", "ethernet"),
    "falcon-180b-a100-tp8": ("falcon-180b", "a100", 8, 1, "ethernet:4", ""),
}

NOTES = {
    "mistral-7b-a100": ("Llama-3-8B has the same layers; its timings are used unscaled.",),
    "yi-34b-a100-tp2": ("Each matrix scaled by size from CodeLlama-34B at TP 2.",),
    "llama2-70b-a40-tp4-pp2": (
        "Linear layers as profiled on A40 at TP 4.",
        "Attention and CPU overheads from A100, slowed by the ratio of the linear layers.",
        "All-reduce from A100 with pairwise NVLink: both cross PCIe for four ranks.",
    ),
    "falcon-180b-a100-tp4-pp2": (
        "By scaling: no timings of Falcon are published. Matrices from Llama-2-70B at TP 4.",
        "Stages linked by 100 Gb/s Ethernet, modelled as 0.1 ms + 10 GB/s.",
    ),
    "falcon-180b-a100-tp8": (
        "By scaling, as the TP 4 x PP 2 deployment; two nodes of four over 100 Gb/s Ethernet.",
    ),
}


def paper_model(name: str) -> CostModel:
    """One of the paper's deployments, composed anew from the operator timings."""
    from dataclasses import replace

    model, device, ranks, stages, network, link = PAPER[name]
    link = {"a40": "a40-pairwise-nvlink"}.get(link, link or network)
    composed = compose(model, device, ranks, stages, network=network, link=link, name=name)
    return replace(composed, notes=NOTES[name])


def main() -> None:
    """Write the paper's deployments to `configs/hardware/`."""
    for name in PAPER:
        paper_model(name).save(CONFIGS / f"{name}.json")


if __name__ == "__main__":
    main()
