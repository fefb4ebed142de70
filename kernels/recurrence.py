"""The operations of layers that keep a state of fixed size instead of keys and values.

Shape suffixes as in `kernels.interface`; here also J taps of a convolution, C its channels, F
features of a key and R rows of states. Such a layer has two kinds of state: the last J - 1 inputs
of a convolution, and a matrix per head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A recurrence over the tokens of a request, whose state is a matrix M_FD per head, with each
    token's query and key of F features and value of D: M = decay M + key (x) u; result = query M.

    Heads n of values have the queries and keys of head n * num_key_heads // num_heads.
    delta: the gated delta rule (Yang et al., 2025): queries and keys are scaled to length 1, and
    queries by F ** -0.5; u = rate (value - key M), with M decayed. Else u = rate value.
    """

    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    delta: bool

    @property
    def num_channels(self) -> int:
        """Features of a token's queries, keys and values, side by side in this order."""
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim


@dataclass(slots=True)
class StateLayer:
    """The states of one layer, in rows; whoever assigns rows says which hold what.

    conv_RJC: of the model's type, with the inputs of a convolution before a token, J - 1 of them.
    matrix_RNFD: float32, of a `Recurrence`; None for a layer with a convolution only.
    """

    conv_RJC: torch.Tensor
    matrix_RNFD: torch.Tensor | None = None


@dataclass(slots=True)
class StateRows:
    """Of the slices of a batch: where they begin in T, and the rows of states before and after
    them. All int32 on the stage's device.

    reads_S: -1 for a state of zeros, before the first token. writes_S: never the row that is read,
    so that a repeated step gives the same results.
    saves_S: a further row for the state after the first save_lengths_S tokens of a slice, at least
    one and at most all; -1 for none. Rows that are saved are neither read nor written otherwise.
    Both are None where no slice has one.
    """

    query_starts_S1: torch.Tensor
    reads_S: torch.Tensor
    writes_S: torch.Tensor
    num_decodes: int  # leading slices of one token
    saves_S: torch.Tensor | None = None
    save_lengths_S: torch.Tensor | None = None


class Mixer(Protocol):
    """What a layer computes in place of attention, between its projections."""

    @property
    def state_bytes(self) -> int:
        """Of one row."""
        ...

    def allocate(self, num_rows: int, device: torch.device) -> StateLayer: ...

    def __call__(
        self,
        projected_TX: torch.Tensor,
        gates_TX: torch.Tensor | None,
        layer: StateLayer,
        rows: StateRows,
        all_reduce: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Projections of the layer's input by `LayerWeights.qkv` and `gates` -> what `out`
        projects. all_reduce: the sum over the ranks of a layer."""
        ...


class Recurrent(Protocol):
    """Part of `kernels.interface.Backend`. Rows of inputs may be parts of longer rows."""

    def causal_conv(
        self,
        x_TC: torch.Tensor,
        weight_JC: torch.Tensor,
        bias_C: torch.Tensor | None,
        layer: StateLayer,
        rows: StateRows,
        silu: bool,
    ) -> torch.Tensor:
        """A convolution over each channel's last J inputs of the same request, weights float32,
        the last one the token's own; then SiLU if silu -> (T, C)."""
        ...

    def recurrence(
        self,
        qkv_TC: torch.Tensor,
        decays_TN: torch.Tensor,
        rates_TN: torch.Tensor,
        layer: StateLayer,
        rows: StateRows,
        form: Recurrence,
    ) -> torch.Tensor:
        """`form` over the tokens of each request, decays and rates float32 -> (T, N * D)."""
        ...
