"""Turn published operator timings into `configs/hardware/operators/*.json`.

    python -m app.simulate.hardware.ingest PROFILES_FOLDER configs/hardware/operators

The folder holds CSV files in the format that the authors of Vidur publish (MIT license): per
layer shape and tensor-parallel degree the time of every operator at many token counts, attention
by batch, chunk and context, collectives by bytes, and the CPU's share of an iteration. Kept are
medians at the token counts where the curve bends, so the repository stays small.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from actors.calibration.fit import nnls

LICENCE = (
    "Medians of operator timings published by the authors of Vidur (github.com/microsoft/vidur), "
    "MIT license, Copyright (c) Microsoft Corporation."
)

# Columns kept, and the published operators they sum.
GROUPS = {
    "qkv": ("attn_pre_proj",),
    "out": ("attn_post_proj",),
    "up": ("mlp_up_proj",),
    "down": ("mlp_down_proj",),
    "other": ("input_layernorm", "post_attention_layernorm", "attn_rope", "mlp_act", "add"),
}

LAYERS = {  # file stem: (device, name in the output)
    "a100_meta-llama_Meta-Llama-3-8B_linear": ("a100", "llama-3-8b"),
    "a100_codellama_CodeLlama-34b-Instruct-hf_linear": ("a100", "codellama-34b"),
    "a100_meta-llama_Llama-2-70b-hf_linear": ("a100", "llama-2-70b"),
    "a40_meta-llama_Llama-2-70b-hf_linear": ("a40", "llama-2-70b"),
    "h100_meta-llama_Llama-2-70b-hf_linear": ("h100", "llama-2-70b"),
}

COLLECTIVES = {  # file stem: (network name, collective)
    "net_a100_pairwise_nvlink_all_reduce": ("a100-pairwise-nvlink", "all_reduce"),
    "net_a100_pairwise_nvlink_send_recv": ("a100-pairwise-nvlink", "send_recv"),
    "net_a100_dgx_all_reduce": ("a100-dgx", "all_reduce"),
    "net_a100_dgx_send_recv": ("a100-dgx", "send_recv"),
    "net_a40_pairwise_nvlink_send_recv": ("a40-pairwise-nvlink", "send_recv"),
    "net_h100_dgx_all_reduce": ("h100-dgx", "all_reduce"),
    "net_h100_dgx_send_recv": ("h100-dgx", "send_recv"),
}


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _wanted(tokens: Iterable[int]) -> list[int]:
    """Token counts worth keeping: small ones, and both sides of every tile of 128."""
    kept = []
    for n in tokens:
        on_tile = n % 128 == 0 and (n <= 2048 or n % 256 == 0) and (n <= 8192 or n % 2048 == 0)
        past_tile = n <= 1032 and n % 128 == 8
        if n in (1, 2, 4, 8, 16, 24, 32, 48, 64, 96) or on_tile or past_tile:
            kept.append(n)
    return kept


def linear(path: Path) -> dict[str, Any]:
    """Per tensor-parallel degree: token counts and milliseconds per layer of each group."""
    samples: dict[tuple[int, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    shape: dict[str, int] = {}
    for row in _rows(path):
        key = (int(float(row["num_tensor_parallel_workers"])), int(float(row["num_tokens"])))
        for group, operators in GROUPS.items():
            values = [float(row[f"time_stats.{o}.median"] or 0.0) for o in operators]
            samples[key][group].append(sum(values))
        shape = {
            "hidden": int(float(row["n_embd"])),
            "intermediate": int(float(row["n_expanded_embd"])),
            "heads": int(float(row["n_head"])),
            "kv_heads": int(float(row["n_kv_head"])),
        }
    degrees: dict[str, Any] = {}
    for degree in sorted({d for d, _ in samples}):
        tokens = _wanted(sorted(n for d, n in samples if d == degree))
        columns = {
            group: [round(median(samples[degree, n][group]), 4) for n in tokens] for group in GROUPS
        }
        degrees[str(degree)] = {"tokens": tokens, **columns}
    return {"shape": shape, "ms": degrees}


def attention(path: Path, heads: int, kv_heads: int, head_dim: int) -> dict[str, float]:
    """Attention of one layer as non-negative coefficients per head, with the fit's error."""
    design: list[tuple[float, ...]] = []
    seconds: list[float] = []
    for row in _rows(path):
        batch, chunk = int(float(row["batch_size"])), int(float(row["prefill_chunk_size"]))
        context = int(float(row["kv_cache_size"]))
        if row["is_prefill"] == "True":
            pairs = chunk * (context + (chunk + 1) / 2)
            design.append((1.0, context + chunk, pairs, chunk * chunk, 0.0, 0.0, 0.0))
            seconds.append(float(row["time_stats.attn_prefill.median"]) / 1e3)
        elif context:
            design.append((0.0, 0.0, 0.0, 0.0, 1.0, batch, batch * context))
            seconds.append(float(row["time_stats.attn_decode.median"]) / 1e3)
    matrix, target = np.array(design), np.array(seconds)
    weights = 1.0 / target
    solution = nnls(matrix * weights[:, None], target * weights)
    error = np.abs(matrix @ solution / target - 1.0)
    prefill = matrix[:, 0] > 0
    return {
        "heads_per_rank": heads,
        "kv_heads_per_rank": kv_heads,
        "head_dim": head_dim,
        "prefill_slice_s": float(solution[0]),
        "prefill_kv_s": float(solution[1]),
        "prefill_pair_s": float(solution[2]),
        "prefill_square_s": float(solution[3]),
        "decode_batch_s": float(solution[4]),
        "decode_slice_s": float(solution[5]),
        "decode_kv_s": float(solution[6]),
        "prefill_error_median": float(np.median(error[prefill])),
        "prefill_error_p95": float(np.quantile(error[prefill], 0.95)),
        "decode_error_median": float(np.median(error[~prefill])),
        "decode_error_p95": float(np.quantile(error[~prefill], 0.95)),
    }


def collective(path: Path, kind: str) -> dict[str, Any]:
    """Per "workers/devices per node": message bytes and milliseconds, at doubling sizes."""
    samples: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in _rows(path):
        key = f"{row['num_workers']}/{row['devices_per_node']}"
        samples[key].append((int(row["size"]), float(row[f"time_stats.{kind}.median"])))
    result: dict[str, Any] = {}
    for key, points in sorted(samples.items()):
        points.sort()
        sizes = np.array([p[0] for p in points], float)
        times = np.array([p[1] for p in points])
        marks = [2.0**k for k in range(11, 40) if 2.0**k <= sizes[-1]] + [sizes[-1]]
        kept_bytes, kept_ms, highest = [], [], 0.0
        for mark in marks:
            near = np.argsort(np.abs(np.log(sizes / mark)))[:9]  # smooth single outliers
            highest = max(highest, float(np.median(times[near])))
            kept_bytes.append(int(mark))
            kept_ms.append(round(highest, 4))
        result[key] = {"bytes": kept_bytes, "ms": kept_ms}
    return result


def cpu_overheads(path: Path) -> dict[str, Any]:
    """Seconds per iteration and per request outside the accelerator, by tensor-parallel degree."""
    points: dict[str, list[tuple[int, float]]] = defaultdict(list)
    parts = (
        "schedule",
        "sampler_e2e",
        "prepare_inputs_e2e",
        "process_model_outputs",
        "ray_comm_time",
    )
    for row in _rows(path):
        total = sum(float(row[f"{part}_mean"]) for part in parts)
        points["1" if int(row["tensor_parallel_degree"]) == 1 else "many"].append(
            (int(row["batch_size"]), total / 1e3)
        )
    result = {}
    for degree, values in points.items():
        matrix = np.array([(1.0, b) for b, _ in values])
        solution = nnls(matrix, np.array([t for _, t in values]))
        result[degree] = {"overhead_s": float(solution[0]), "per_request_s": float(solution[1])}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("profiles", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    devices: dict[str, dict[str, Any]] = defaultdict(lambda: {"source": LICENCE, "layers": {}})
    for stem, (device, name) in LAYERS.items():
        devices[device]["layers"][name] = linear(args.profiles / f"{stem}.csv")
    devices["a100"]["attention"] = attention(
        args.profiles / "a100_attention_64q8kv_tp2.csv", heads=32, kv_heads=4, head_dim=128
    )
    devices["a100"]["cpu"] = cpu_overheads(args.profiles / "a100_cpu_overheads.csv")
    networks: dict[str, Any] = {"source": LICENCE}
    for stem, (network, kind) in COLLECTIVES.items():
        networks.setdefault(network, {})[kind] = collective(args.profiles / f"{stem}.csv", kind)
    for name, data in {**devices, "networks": networks}.items():
        text = json.dumps(data, indent=1)
        (args.out / f"{name}.json").write_text(_fold(text) + "\n", encoding="utf-8")


def _fold(text: str) -> str:
    """Put every innermost list on one line."""
    out: list[str] = []
    depth = 0
    for line in text.splitlines():
        if depth:
            out[-1] += " " + line.strip() if not line.strip().startswith("]") else line.strip()
            depth -= line.strip().startswith("]")
        else:
            out.append(line)
            depth += line.rstrip().endswith("[")
    return "\n".join(out)


if __name__ == "__main__":
    main()
