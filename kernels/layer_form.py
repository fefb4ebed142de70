"""The operations between a model's linear layers, as a few orthogonal choices."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerForm:
    """The operations between the linear layers of a model; defaults are Llama's.

    norm: "rms" or "layer" (with the mean subtracted).
    activation: one of `ACTIVATIONS`, of the gate, which multiplies up; without a gate of up.
    parallel: attention and MLP read the same input, or two norms of it (parallel residual).
    whole_qk_norm: q and k are normed over all heads of all ranks, not per head.
    """

    eps: float
    norm: str = "rms"
    activation: str = "silu"
    gated: bool = True
    parallel: bool = False
    whole_qk_norm: bool = False


# GELU by the error function, and by its approximation with tanh. clamped_swiglu is gpt-oss's, with
# g = min(gate, 7) and u = up within 7 of zero: g sigmoid(1.702 g) (u + 1).
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "clamped_swiglu")
