"""One linear layer of all experts, for kernels that read the addresses of weights from a table."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kernels.layer_weights import Experts, Linear
from kernels.packing import PackedWeight
from kernels.torch.linear import TorchLinear
from kernels.triton.linear import QuantizedLinear

_ALIGNMENT = 16  # bytes, of the widest load; said to the compiler in the kernel


@dataclass(frozen=True, slots=True)
class GroupedLinear:
    """One layer of every expert, all of one form.

    addresses_PE: int64, of held dense weights (O, K), or of codes, scales and zeros of packed ones.
    bias_EO: zeros for an expert that has none.
    """

    addresses_PE: torch.Tensor
    bias_EO: torch.Tensor | None
    held: tuple[torch.Tensor, ...] | tuple[PackedWeight, ...]

    @property
    def dtype(self) -> torch.dtype | None:
        """What x must have; None: packed weights multiply any."""
        first = self.held[0]
        return first.dtype if isinstance(first, torch.Tensor) else None

    @property
    def size(self) -> tuple[int, int]:
        """(out, in) features."""
        first = self.held[0]
        if isinstance(first, PackedWeight):
            return first.out_features, first.in_features
        out_features, in_features = first.shape
        return out_features, in_features


# Per mixture: gate and up, and down; None where the experts of a layer are of different forms.
GroupedLayers = tuple[GroupedLinear, GroupedLinear]
_grouped: weakref.WeakKeyDictionary[Experts, GroupedLayers | None] = weakref.WeakKeyDictionary()


def grouped(experts: Experts) -> GroupedLayers | None:
    """(gate and up, down) of all experts, made once; None where some are in act order, or packed
    differently."""
    if experts not in _grouped:
        gate_up, down = _group(experts.gate_ups), _group(experts.downs)
        _grouped[experts] = None if gate_up is None or down is None else (gate_up, down)
    return _grouped[experts]


def is_grouped(experts: Experts) -> bool:
    """Whether `moe` launches the same for every routing, and so can be captured."""
    return grouped(experts) is not None


def _group(linears: Sequence[Linear]) -> GroupedLinear | None:
    """Raises ValueError for dense weights of several shapes or types."""
    dense = [linear for linear in linears if isinstance(linear, TorchLinear)]
    packed = [x for x in linears if isinstance(x, QuantizedLinear) and x.permutation_K is None]
    held: tuple[torch.Tensor, ...] | tuple[PackedWeight, ...]
    if len(dense) == len(linears):
        kinds = {(linear.weight_OK.shape, linear.weight_OK.dtype) for linear in dense}
        if len(kinds) != 1:
            raise ValueError(f"experts of one layer differ: {kinds}")
        held = tuple(_aligned(linear.weight_OK) for linear in dense)
        parts = [list(held)]
        biases = [linear.bias_O for linear in dense]
    elif len(packed) == len(linears):
        held = _alike([linear.packed for linear in packed])
        if len({(w.kind, w.codes.shape, w.group, w.scales.dtype) for w in held}) != 1:
            return None
        parts = [[w.codes for w in held], [w.scales for w in held]]
        parts.append([w.codes if w.zeros is None else w.zeros for w in held])
        biases = [linear.bias_O for linear in packed]
    else:
        return None
    device = parts[0][0].device
    addresses_PE = torch.tensor([[t.data_ptr() for t in part] for part in parts], device=device)
    bias_EO = None
    given = [bias_O for bias_O in biases if bias_O is not None]
    if given:
        none_O = torch.zeros_like(given[0])
        bias_EO = torch.stack([none_O if bias_O is None else bias_O for bias_O in biases])
    return GroupedLinear(addresses_PE, bias_EO, held)


def _alike(weights: Sequence[PackedWeight]) -> tuple[PackedWeight, ...]:
    """With zeros, where one of them has some."""
    if all(weight.zeros is None for weight in weights):
        return tuple(weights)
    return tuple(
        replace(weight, zeros=torch.zeros_like(weight.scales, dtype=torch.int8))
        if weight.zeros is None
        else weight
        for weight in weights
    )


def _aligned(weight_OK: torch.Tensor) -> torch.Tensor:
    weight_OK = weight_OK.contiguous()
    return weight_OK if weight_OK.data_ptr() % _ALIGNMENT == 0 else weight_OK.clone()
