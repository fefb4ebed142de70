"""From published operator timings to the cost model of a whole deployment.

A deployment is a model shape, a device, a tensor-parallel degree, a number of pipeline stages and
two networks (inside a stage, between stages). `compose` sums the operators of one stage's layers.
A shape that was never profiled borrows the closest profiled one, each matrix scaled by its size:
both the memory floor (weights) and the compute above it grow in that proportion.

Of a mixture of experts, a step reads those that its tokens are expected to touch if they are routed
evenly. Each takes the time of its matrices on an even share of the tokens. Of layers that keep
states, a step takes the time of their projections and of moving the states: the arithmetic between,
which has no published timings, is left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import numpy as np

from actors.scheduling.cost.model import CostModel
from actors.scheduling.setting import fits, in_words
from app.paths import locate
from app.simulate.hardware.model_config import shape_at
from app.simulate.hardware.networks import all_reduce_s, send_s
from app.simulate.hardware.operators import CONFIGS, read_operators
from app.simulate.hardware.shapes import DEVICES, MODELS, Device, ModelShape, experts_touched

# Share of a device's memory that holds weights and KV, as serving systems set it by default, and
# what activations take of it.
MEMORY_SHARE, ACTIVATION_BYTES = 0.9, 2e9


# Tensor ranks and stages tried, in this order, for a model that comes without a deployment.
PLACEMENTS = ((1, 1), (2, 1), (4, 1), (4, 2), (4, 4), (4, 8))


def load_model(name: str | Path) -> CostModel:
    """A JSON file, or a cost model of `configs/hardware` by name. A model's folder, or its
    config.json: the cost model of that model on the fewest A100s that hold it and the KV of its
    longest sequence.

    Raises OSError, or ValueError naming those there are or what is wrong in the file.
    """
    if (shape := shape_at(name)) is not None:
        return _on_fewest(shape, "a100")
    path = locate(name)
    if path.suffix != ".json":
        path = CONFIGS / f"{name}.json"
        if not path.exists():
            known = sorted(p.stem for p in CONFIGS.glob("*.json"))
            raise ValueError(f"no cost model {name!r}; known: {', '.join(known)}")
    return _read_model(path)


def _read_model(path: Path) -> CostModel:
    """Raises ValueError naming the file, for anything in it that makes no cost model."""
    try:
        data = json.loads(path.read_text("utf-8"))
        if not isinstance(data, dict):
            raise ValueError("a cost model is a mapping of keys to values")
        for key, kind in get_type_hints(CostModel).items():
            if key in data and get_origin(kind) is tuple and not isinstance(data[key], list):
                raise ValueError(f"{key}: must be a list, not {data[key]!r}")
            if key in data and get_origin(kind) is not tuple and not fits(data[key], kind):
                raise ValueError(f"{key}: must be {in_words(kind)}, not {data[key]!r}")
        return CostModel.from_dict(data)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"{path}: {error}") from error


def save_model(model: CostModel, path: Path) -> None:
    """Write the model as JSON, one key per line, so that files can be compared."""
    rows = (f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in model.to_dict().items())
    path.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


def _on_fewest(shape: ModelShape, device: str) -> CostModel:
    """Raises ValueError if the largest placement is too small."""
    for ranks, stages in PLACEMENTS:
        with suppress(DoesNotFit):
            model = compose(shape, device, ranks, stages)
            if model.kv_tokens >= max(shape.max_model_len, model.state_tokens) + model.state_tokens:
                return model
    ranks, stages = PLACEMENTS[-1]
    raise DoesNotFit(f"{shape.name} does not fit on {ranks * stages} x {device}")


def compose(
    model: str | ModelShape,
    device: str,
    tensor_ranks: int,
    num_stages: int,
    *,
    network: str = "a100-pairwise-nvlink",
    link: str = "a100-pairwise-nvlink",
    name: str = "",
) -> CostModel:
    """The cost model of `model` (of `MODELS` by name) on num_stages x tensor_ranks devices.

    Raises ValueError for what has no published timings, and if the weights do not fit.
    """
    for kind, name_, known in (("model", model, MODELS), ("device", device, DEVICES)):
        if isinstance(name_, str) and name_ not in known:
            raise ValueError(f"unknown {kind} {name_!r}; known: {', '.join(sorted(known))}")
    shape = MODELS[model] if isinstance(model, str) else model
    target = DEVICES[device]
    data = read_operators(device)["layers"].get(shape.profiled)
    if data is None:
        raise ValueError(f"no published timings of layers of {shape.profiled} on {device}")
    layers = -(-shape.num_layers // num_stages)
    tokens, layer_s = _layer_seconds(shape, device, tensor_ranks)
    sizes = [2.0 * n * shape.hidden for n in tokens]
    collective_s = [
        shape.all_reduces * layers * s for s in all_reduce_s(network, tensor_ranks, sizes)
    ]
    total = [layers * s + c for s, c in zip(layer_s, collective_s, strict=True)]
    kv_tokens = kv_capacity_tokens(shape, target, tensor_ranks * num_stages)
    cpu = read_operators("a100")["cpu"]["1" if tensor_ranks == 1 else "many"]
    attention = _attention(shape, target, tensor_ranks, layers)
    batch_s = attention.pop("decode_batch_s")
    base = CostModel(
        name=name or f"{shape.name}-{device}-tp{tensor_ranks}-pp{num_stages}",
        source=read_operators(device)["source"],
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
        state_tokens=math.ceil(shape.state_bytes / shape.kv_bytes_per_token),
        max_model_len=shape.max_model_len,
    )
    return CostModel.from_dict({**base.to_dict(), **attention})


class DoesNotFit(ValueError):
    """The weights are larger than the devices' memory."""


def kv_capacity_tokens(shape: ModelShape, device: Device, num_devices: int) -> int:
    """KV tokens that fit beside the weights. Raises DoesNotFit."""
    room = num_devices * (MEMORY_SHARE * device.memory_bytes - ACTIVATION_BYTES)
    free = room - shape.weight_bytes
    if free <= 0:
        raise DoesNotFit(f"{shape.name} does not fit on {num_devices} x {device.name}")
    return int(free / shape.kv_bytes_per_token)


def operator_ms(
    shape: ModelShape, device: str, tensor_ranks: int
) -> tuple[list[int], dict[str, list[float]]]:
    """Milliseconds of one layer's matrices ("qkv", "out", "up", "down"), "other" operators and
    "experts", if it has any, by token count. Raises ValueError for ranks without published
    timings."""
    data = read_operators(device)["layers"][shape.profiled]
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
    scale["other"] = shape.hidden / profiled["hidden"] * shape.norms_per_layer / 2
    tokens = [int(n) for n in table["tokens"]]
    groups = {group: [factor * ms for ms in table[group]] for group, factor in scale.items()}
    if (experts := shape.experts) is not None:
        sizes = shape.mlp(experts.width)
        groups["experts"] = []
        for n in tokens:
            touched = experts_touched(experts.number, experts.per_token, n)
            each = n * experts.per_token / touched  # tokens
            one = sum(
                sizes[group] / reference[group] * float(np.interp(each, tokens, table[group]))
                for group in sizes
            )
            groups["experts"].append(shape.expert_share * touched * one)
    return tokens, groups


def _layer_seconds(
    shape: ModelShape, device: str, tensor_ranks: int
) -> tuple[list[int], list[float]]:
    """Seconds of one layer's operators but attention by token count."""
    tokens, groups = operator_ms(shape, device, tensor_ranks)
    seconds = [sum(column) / 1e3 for column in zip(*groups.values(), strict=True)]
    return tokens, np.maximum.accumulate(seconds).tolist()


def _edges(tokens: Sequence[int], seconds: Sequence[float]) -> tuple[tuple[int, float], ...]:
    """Knots with tile steps as jumps: what was measured just past an edge holds from there on."""
    knots = []
    for n, s in zip(tokens, seconds, strict=True):
        past_edge = n > 128 and n % 128 == 8
        knots.append((n - 7 if past_edge else n, round(s, 7)))
    return tuple(knots)


def _attention(
    shape: ModelShape, device: Device, tensor_ranks: int, layers: float
) -> dict[str, float]:
    """Attention coefficients of one stage, from those of the profiled head counts."""
    profiled = read_operators("a100")["attention"]
    heads = shape.heads * shape.head_dim / tensor_ranks
    query = heads / (profiled["heads_per_rank"] * profiled["head_dim"]) * device.attention_compute
    kv_heads = max(1.0, shape.kv_heads / tensor_ranks) * shape.head_dim
    memory = kv_heads / (profiled["kv_heads_per_rank"] * profiled["head_dim"])
    memory *= device.attention_memory
    states_s = 0.0
    if (states := shape.states) is not None:
        # A step reads the states of each request and writes them, as fast as it reads KV.
        part = shape.state_layers / shape.num_layers
        kv_bytes = 4.0 * profiled["kv_heads_per_rank"] * profiled["head_dim"]
        byte_s = profiled["decode_kv_s"] / kv_bytes * device.attention_memory
        states_s = layers * part * 2 * states.state_bytes / tensor_ranks * byte_s
    layers *= shape.attention_layers / shape.num_layers
    return {
        "decode_batch_s": layers * profiled["decode_batch_s"],
        "prefill_slice_s": layers * profiled["prefill_slice_s"] + states_s,
        "prefill_kv_s": layers * profiled["prefill_kv_s"] * memory,
        "prefill_pair_s": layers * profiled["prefill_pair_s"] * query,
        "prefill_square_s": layers * profiled["prefill_square_s"] * query,
        "decode_slice_s": layers * profiled["decode_slice_s"] + states_s,
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
        "Stages linked by 100 Gb/s Ethernet, modeled as 0.1 ms + 10 GB/s.",
    ),
    "falcon-180b-a100-tp8": (
        "By scaling, as the TP 4 x PP 2 deployment; two nodes of four over 100 Gb/s Ethernet.",
    ),
}


def paper_model(name: str) -> CostModel:
    """One of the paper's deployments, composed anew from the operator timings."""
    model, device, ranks, stages, network, link = PAPER[name]
    link = {"a40": "a40-pairwise-nvlink"}.get(link, link or network)
    composed = compose(model, device, ranks, stages, network=network, link=link, name=name)
    return replace(composed, notes=NOTES[name])


def main() -> None:
    """Write the paper's deployments to `configs/hardware/`."""
    for name in PAPER:
        save_model(paper_model(name), CONFIGS / f"{name}.json")


if __name__ == "__main__":
    main()
