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


@dataclass(frozen=True, slots=True)
class Routing:
    """How the router's logits choose a token's experts and weight them; defaults are Mixtral's.

    scores: "softmax" or "sigmoid" of the logits.
    num_groups: of equally many experts each. Only experts of the `kept_groups` best groups are
    chosen: those with the highest sums of their `best_of_group` highest scores.
    least_sum: what renormalized weights are divided by at least.
    scale: of the weights, after all else.
    """

    scores: str = "softmax"
    num_groups: int = 1
    kept_groups: int = 1
    best_of_group: int = 2
    least_sum: float = 0.0
    scale: float = 1.0


BY_SOFTMAX = Routing()


# GELU by the error function, and by its approximation with tanh. clamped_swiglu is gpt-oss's, with
# g = min(gate, 7) and u = up within 7 of zero: g sigmoid(1.702 g) (u + 1). relu2: ReLU's square.
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "clamped_swiglu", "relu2")
