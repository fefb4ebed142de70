"""Moving KV between engines: how many bytes, and how long they take."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from app import paths
from app.simulate.hardware.networks import ETHERNET_BYTES_PER_S, ETHERNET_LATENCY_S

SHAPES = paths.CONFIGS / "models" / "shapes"
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Interconnect:
    """What joins the engines. bytes_per_s: of each engine's one link."""

    name: str
    bytes_per_s: float
    latency_s: float

    def transfer_s(self, num_bytes: float) -> float:
        """Seconds of one transfer over an idle link."""
        return self.latency_s + num_bytes / self.bytes_per_s


INTERCONNECTS: Mapping[str, Interconnect] = {
    interconnect.name: interconnect
    for interconnect in (
        Interconnect("nvlink", 300e9, 10e-6),
        Interconnect("ethernet", ETHERNET_BYTES_PER_S, ETHERNET_LATENCY_S),
    )
}


def parse_interconnect(text: str) -> Interconnect:
    """A name, or `GB/s,microseconds`. Raises ValueError naming those there are.

    >>> parse_interconnect("25,5")
    Interconnect(name='25,5', bytes_per_s=25000000000.0, latency_s=5e-06)
    """
    if text in INTERCONNECTS:
        return INTERCONNECTS[text]
    try:
        gigabytes_per_s, latency_us = (float(part) for part in text.split(","))
    except ValueError:
        gigabytes_per_s, latency_us = 0.0, 0.0
    if not gigabytes_per_s > 0.0 or latency_us < 0.0:
        known = ", ".join(INTERCONNECTS)
        raise ValueError(f"unknown interconnect {text!r}; known: {known}, or GB/s,microseconds")
    return Interconnect(text, gigabytes_per_s * 1e9, latency_us / 1e6)


@dataclass(slots=True)
class Links:
    """One link per engine, which its transfers take in turn; sending takes both ends' links."""

    interconnect: Interconnect
    num_bytes: float = 0.0
    busy_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # by engine
    _free_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def send(self, source: str, target: str, num_bytes: float, now_s: float) -> float:
        """Queue a transfer; returns the time at which it has arrived."""
        begin_s = max(now_s, self._free_s[source], self._free_s[target])
        wire_s = num_bytes / self.interconnect.bytes_per_s
        for end in (source, target):
            self._free_s[end] = begin_s + wire_s
            self.busy_s[end] += wire_s
        self.num_bytes += num_bytes
        return begin_s + wire_s + self.interconnect.latency_s


def kv_bytes_per_token(shape: str) -> float:
    """Bytes of KV of one token on all ranks, keys and values of every layer.

    Raises ValueError naming the shapes of `configs/models/shapes`.
    """
    path = SHAPES / shape / "config.json"
    if not shape or not path.exists():
        raise ValueError(f"no shape {shape!r}; known: {', '.join(known_shapes())}")
    return kv_bytes_of(json.loads(path.read_text("utf-8")))


def kv_bytes_of(keys: Mapping[str, Any], dtype: str | None = None) -> float:
    """Like `kv_bytes_per_token`, from the keys of a config.json.

    dtype: that of the KV, if it differs from the model's.
    """
    heads = keys["num_attention_heads"]
    kv_heads = keys.get("num_key_value_heads", keys.get("num_kv_heads", heads))
    head_dim = keys.get("head_dim", keys["hidden_size"] // heads)
    return float(
        2 * keys["num_hidden_layers"] * kv_heads * head_dim * _BYTES[dtype or keys["torch_dtype"]]
    )


def known_shapes() -> list[str]:
    return sorted(path.parent.name for path in SHAPES.glob("*/config.json"))


def shape_of(model: str) -> str:
    """The shape of a cost model of `configs/hardware`, whose name begins with it; "": unknown."""
    return max((shape for shape in known_shapes() if model.startswith(shape)), key=len, default="")
