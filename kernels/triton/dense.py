"""Dense linear layers: a kernel of their own for few tokens, cuBLAS for more.

A product with few tokens streams the weight once. cuBLAS splits the smaller ones over K and sums in
a second launch. On an H100 the four products of a Llama-3-8B's layer take 165 us by cuBLAS with one
token and 156 by this kernel; 166 and 158 with 16; 166 and 164 with 32 (`legato bench gpu --only
kernels`).
"""

import torch
import triton
import triton.language as tl

from kernels.torch.linear import TorchLinear
from kernels.triton.tiles import most_shared_bytes, target_arch

TILES = (16, 32)  # tokens
MOST_TOKENS = TILES[-1]
# Weight rows and input features of a tile: a warpgroup multiplies 64 rows, and four tiles in
# flight per multiprocessor keep its share of the memory busy.
_BLOCK_O = 64
_BLOCK_K = 256
_NUM_STAGES = 4
# Measured on Hopper; among newer GPUs those of workstations have too little shared memory.
_LEAST_ARCH = 90
_SHARED_BYTES = _NUM_STAGES * (_BLOCK_O + MOST_TOKENS) * _BLOCK_K * 2


@triton.jit(do_not_specialize=["T"])
def _few_tokens_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    T: tl.tensor,
    OUT: tl.constexpr,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    t = tl.arange(0, BLOCK_T)
    k = tl.arange(0, BLOCK_K)
    inside_T = t < T
    weight_row_O1 = o.to(tl.int64)[:, None] * K
    acc_OT = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
    for begin in range(0, K, BLOCK_K):
        weight_OK = tl.load(weight_ptr + weight_row_O1 + (begin + k)[None, :])
        x_KT = tl.load(
            x_ptr + t[None, :] * K + (begin + k)[:, None], mask=inside_T[None, :], other=0.0
        )
        acc_OT = tl.dot(weight_OK, x_KT, acc_OT)
    if HAS_BIAS:
        acc_OT += tl.load(bias_ptr + o).to(tl.float32)[:, None]
    place = out_ptr + t[None, :] * OUT + o[:, None]
    tl.store(place, acc_OT.to(out_ptr.dtype.element_ty), mask=inside_T[None, :])


def has_kernel(out_features: int, in_features: int, dtype: torch.dtype) -> bool:
    """Whether few tokens have a kernel of their own on this GPU."""
    arch = target_arch()
    return (
        dtype.itemsize == 2
        and out_features % _BLOCK_O == 0
        and in_features % _BLOCK_K == 0
        and arch >= _LEAST_ARCH
        and most_shared_bytes(arch) > _SHARED_BYTES
    )


class DenseLinear(TorchLinear):
    """A row's bits are the same whatever the other rows of its tile of 16 or 32."""

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        if 0 < x_TK.shape[0] <= MOST_TOKENS and self._fits(x_TK):
            return self.multiply_few(x_TK)
        return super().__call__(x_TK)

    def warm(self) -> None:
        """Compile the kernel's variants for this layer, where it has some."""
        for tokens in TILES:
            self(self.weight_OK.new_zeros(tokens, self.in_features))

    def _fits(self, x_TK: torch.Tensor) -> bool:
        is_same = x_TK.dtype == self.weight_OK.dtype
        return is_same and has_kernel(self.out_features, self.in_features, x_TK.dtype)

    def multiply_few(self, x_TK: torch.Tensor) -> torch.Tensor:
        """x_TO of at most `MOST_TOKENS` tokens, where `has_kernel`, whichever is faster."""
        T = x_TK.shape[0]
        out_TO = torch.empty(T, self.out_features, dtype=x_TK.dtype, device=x_TK.device)
        _few_tokens_kernel[(self.out_features // _BLOCK_O,)](
            x_TK.contiguous(),
            self.weight_OK,
            self.weight_OK if self.bias_O is None else self.bias_O,
            out_TO,
            T,
            OUT=self.out_features,
            K=self.in_features,
            HAS_BIAS=self.bias_O is not None,
            BLOCK_T=next(tile for tile in TILES if tile >= T),
            BLOCK_O=_BLOCK_O,
            BLOCK_K=_BLOCK_K,
            num_warps=4,
            num_stages=_NUM_STAGES,
        )
        return out_TO
