"""Logits processors on the GPU: biases, penalties, banned tokens and grammar masks.

The host collects every changed (row, token) of a step into one list of edits, so a step costs one
transfer and two launches, however many requests have adjustments.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from kernels.sampling import Adjustment
from kernels.upload import upload

_BLOCK_EDITS = 256
_BLOCK_V = 1024


@triton.jit(do_not_specialize=["num_edits", "row_stride"])
def _edit_kernel(
    logits_ptr: tl.tensor,
    edits_ptr: tl.tensor,
    num_edits: tl.tensor,
    row_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    edit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = edit < num_edits
    field_ptr = edits_ptr + edit * 5
    row = tl.load(field_ptr, mask=inside, other=0).to(tl.int64)
    token = tl.load(field_ptr + 1, mask=inside, other=0)
    bias = tl.load(field_ptr + 2, mask=inside, other=0).to(tl.float32, bitcast=True)
    factor = tl.load(field_ptr + 3, mask=inside, other=0).to(tl.float32, bitcast=True)
    factor = tl.where(inside, factor, 1.0)
    penalty = tl.load(field_ptr + 4, mask=inside, other=0).to(tl.float32, bitcast=True)
    at = logits_ptr + row * row_stride + token
    x = tl.load(at, mask=inside, other=0.0) + bias
    x = tl.where(x > 0, x / factor, x * factor) - penalty
    tl.store(at, x, mask=inside)


@triton.jit(
    do_not_specialize=["row_stride", "V", "W"], do_not_specialize_on_alignment=["masks_ptr"]
)
def _mask_kernel(
    logits_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    masks_ptr: tl.tensor,
    row_stride: tl.tensor,
    V: tl.tensor,
    W: tl.tensor,
    BLOCK_V: tl.constexpr,
) -> None:
    entry = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    row = tl.load(rows_ptr + entry).to(tl.int64)
    word = tl.load(masks_ptr + entry * W + v // 32, mask=v < V, other=0)
    banned = ((word >> (v % 32)) & 1) == 0
    tl.store(logits_ptr + row * row_stride + v, -float("inf"), mask=(v < V) & banned)


def edits_of(a: Adjustment, forbidden: tuple[int, ...]) -> NDArray[np.int32]:
    """(edits, 5) of one row: row, token, then float32 bits of bias, factor and penalty.

    A token becomes (x + bias) divided (if positive, else multiplied) by factor, less penalty.
    """
    counts, ids = a.counted(), np.zeros(0, dtype=np.int32)
    if counts is not None:
        ids = counts.ids
    # Behind the counted tokens those that are only biased or forbidden: one edit a token.
    others: dict[int, int] = {}
    for token in (*(token for token, _ in a.bias), *forbidden):
        if counts is None or counts.place(token) is None:
            others.setdefault(token, len(ids) + len(others))

    def place(token: int) -> int:
        found = None if counts is None else counts.place(token)
        return others[token] if found is None else found

    edits = np.zeros((len(ids) + len(others), 5), dtype=np.int32)
    numbers = edits.view(np.float32)
    edits[:, 0], numbers[:, 3] = a.row, 1.0
    edits[: len(ids), 1], edits[len(ids) :, 1] = ids, [*others]
    for token, bias in a.bias:
        numbers[place(token), 2] += bias
    if counts is not None:
        if a.repetition_penalty != 1.0:
            numbers[: len(ids), 3][counts.totals > 0] = a.repetition_penalty
        if a.counts_output:
            penalty = a.frequency_penalty * counts.in_output + a.presence_penalty
            numbers[: len(ids), 4] = np.where(counts.in_output > 0, penalty, 0.0)
    for token in forbidden:
        numbers[place(token), 4] = np.inf
    return edits


def _without(mask_W: torch.Tensor, forbidden: tuple[int, ...], V: int) -> NDArray[np.int32]:
    """The grammar's mask without forbidden tokens, unless no other of the V tokens would remain."""
    words = mask_W.cpu().numpy().copy()
    for token in forbidden:
        words[token // 32] &= ~np.int32(np.uint32(1 << (token % 32)).view(np.int32))
    last = int(words[V // 32]) & ((1 << V % 32) - 1) if V % 32 else 0  # bits behind it may be set
    return words if last or words[: V // 32].any() else mask_W.cpu().numpy()


def adjust(logits_SV: torch.Tensor, adjustments: Sequence[Adjustment]) -> None:
    """In place on float32 logits, as `kernels.torch.sampling.adjust`."""
    if not adjustments:
        return
    masked = [a for a in adjustments if a.allowed_W is not None]
    # With a grammar, banned tokens are cleared in its mask, unless that would leave no token.
    edits = np.concatenate(
        [edits_of(a, () if a.allowed_W is not None else a.forbidden) for a in adjustments]
    )
    device, V = logits_SV.device, logits_SV.shape[1]
    if len(edits):
        edits_E5 = upload(edits, device)
        _edit_kernel[(triton.cdiv(len(edits), _BLOCK_EDITS),)](
            logits_SV, edits_E5, len(edits), logits_SV.stride(0), BLOCK=_BLOCK_EDITS
        )
    if masked:
        words = [_without(a.allowed_W, a.forbidden, V) for a in masked if a.allowed_W is not None]
        packed = np.concatenate(([a.row for a in masked], *words)).astype(np.int32)
        on_device = upload(packed, device)
        num_words = len(words[0])
        _mask_kernel[(len(masked), triton.cdiv(V, _BLOCK_V))](
            logits_SV,
            on_device[: len(masked)],
            on_device[len(masked) :],
            logits_SV.stride(0),
            V,
            num_words,
            BLOCK_V=_BLOCK_V,
        )


def warm(device: torch.device) -> None:
    """Compile both kernels ahead of the first request that needs them."""
    nothing = np.zeros(0, dtype=np.int32)
    mask_W = torch.full((1,), -1, dtype=torch.int32)
    changes = [
        Adjustment(0, nothing, nothing, ((0, 1.0),)),
        Adjustment(1, nothing, nothing, allowed_W=mask_W),
    ]
    adjust(torch.zeros((2, 32), dtype=torch.float32, device=device), changes)
