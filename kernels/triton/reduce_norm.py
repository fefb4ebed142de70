"""The sum over ranks, the residual sum and RMSNorm in one launch: one program per token.

A program writes its row of this rank's part where all ranks read it, adds one to that row's count
on every rank, and waits until its own count says that every rank has written; then it reads the
row's parts. Counts only grow, and calls are counted on the device, so a captured graph can be
replayed any number of times.

Two windows alternate from call to call of a row, so nothing waits for readers. A rank writes a
window again two calls later, after it has seen every rank begin the call in between; a rank begins
that call's kernel when the one before, which read the window, has ended.

A count may reach its goal with one of a faster rank's next call instead of a slower rank's own.
The faster rank has by then waited for the slower one itself, and its addition, a release after an
acquire, makes the slower rank's row visible as well.

All programs of a launch must be able to run at once (`kernels.all_reduce.PEER_ROWS`), since they
wait for programs of other ranks.
"""

import torch
import triton
import triton.language as tl

from kernels.all_reduce import PeerMemory
from kernels.triton.norm import normalized, num_warps_for, store_rounded


@triton.jit
def _reduce_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    address_ptr: tl.tensor,
    calls_ptr: tl.tensor,
    count_ptr: tl.tensor,
    window_ptr: tl.tensor,
    eps: tl.tensor,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    inside = h < H
    part_type: tl.constexpr = x_ptr.dtype.element_ty
    call = tl.load(calls_ptr + token) + 1
    row = (call % 2) * ROWS + token

    part_H = tl.load(x_ptr + token * H + h, mask=inside, other=0.0)
    tl.store(window_ptr + row * H + h, part_H, mask=inside)
    tl.debug_barrier()  # all threads have written: one thread's release covers them
    r = tl.arange(0, BLOCK_R)
    address_R = tl.load(address_ptr + r, mask=r < RANKS, other=0)
    count_ptr_R = address_R.to(tl.pointer_type(tl.int64)) + token
    one_R = tl.full((BLOCK_R,), 1, tl.int64)
    tl.atomic_add(count_ptr_R, one_R, mask=r < RANKS, sem="release", scope="sys")
    # Loaded while others write.
    residual_H = tl.load(residual_ptr + token * H + h, mask=inside, other=0.0).to(tl.float32)
    weight_H = tl.load(weight_ptr + h, mask=inside, other=0.0)
    while tl.atomic_add(count_ptr + token, 0, sem="acquire", scope="sys") < call * RANKS:
        pass
    tl.store(calls_ptr + token, call)

    total_H = tl.zeros((BLOCK_H,), tl.float32)
    for rank in tl.static_range(RANKS):
        peer_ptr = tl.load(address_ptr + RANKS + rank).to(tl.pointer_type(part_type))
        peer_ptr = tl.multiple_of(peer_ptr, 16)
        total_H += tl.load(peer_ptr + row * H + h, mask=inside, other=0.0).to(tl.float32)
    # Rounded first, as one rank's product is.
    total_H = residual_H + total_H.to(part_type).to(tl.float32)
    total_H = store_rounded(residual_ptr + token * H, total_H, h, inside)
    store_rounded(out_ptr + token * H, normalized(total_H, weight_H, eps, H), h, inside)


def reduce_add_rms_norm(
    x_TH: torch.Tensor,
    residual_TH: torch.Tensor,
    weight_H: torch.Tensor,
    eps: float,
    peers: PeerMemory,
) -> torch.Tensor:
    """Norm of `residual += sum of all ranks' x` (in place). peers must hold x."""
    T, H = x_TH.shape
    num_ranks = peers.addresses_2R.shape[1]
    out_TH = torch.empty_like(x_TH)
    block = triton.next_power_of_2(H)
    _reduce_norm_kernel[(T,)](
        x_TH,
        residual_TH,
        weight_H,
        out_TH,
        peers.addresses_2R,
        peers.calls_P,
        peers.counts_P,
        peers.windows_2PH,
        eps,
        RANKS=num_ranks,
        ROWS=peers.windows_2PH.shape[1],
        H=H,
        BLOCK_R=triton.next_power_of_2(num_ranks),
        BLOCK_H=block,
        num_warps=num_warps_for(block),
    )
    return out_TH
