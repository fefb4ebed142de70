"""Linear layers in PyTorch: dense, and quantized ones that are dequantized in every call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.packing import PackedWeight


@dataclass(slots=True)
class TorchLinear:
    """A dense weight; one quantized at load is kept dense, rounded to its grid."""

    weight_OK: torch.Tensor
    bias_O: torch.Tensor | None
    in_features: int
    out_features: int

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        return functional.linear(x_TK, self.weight_OK, self.bias_O)

    def forward_f32(self, x_TK: torch.Tensor) -> torch.Tensor:
        return self(x_TK)


@dataclass(slots=True)
class TorchHeadLinears:
    """weight_NKO: one dense weight per head."""

    weight_NKO: torch.Tensor

    def __call__(self, x_TNK: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x_TNK.transpose(0, 1), self.weight_NKO).transpose(0, 1).contiguous()


class TorchQuantizedLinear:
    """A packed weight, for the duration of a call dense in the dtype of x.

    permutation_K: the input that is feature k of the weight; None: input k.
    """

    def __init__(
        self,
        packed: PackedWeight,
        bias_O: torch.Tensor | None,
        permutation_K: torch.Tensor | None = None,
    ) -> None:
        self.packed = packed
        self.bias_O = bias_O
        self.permutation_K = permutation_K
        self.in_features = packed.in_features
        self.out_features = packed.out_features

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight with its scales, zeros and input order."""
        return self.packed.num_bytes + (
            0 if self.permutation_K is None else self.permutation_K.nbytes
        )

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        if self.permutation_K is not None:
            x_TK = x_TK.index_select(1, self.permutation_K)
        return self._multiply(x_TK)

    def forward_f32(self, x_TK: torch.Tensor) -> torch.Tensor:
        return self(x_TK)

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The dense weight (O, K), input features in the order of `packed`."""
        return self.packed.dequantize(dtype)

    def _multiply(self, x_TK: torch.Tensor) -> torch.Tensor:
        return functional.linear(x_TK, self.dequantize(x_TK.dtype), self.bias_O)
