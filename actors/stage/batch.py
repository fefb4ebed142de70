"""From a plan's slices to the tensors of one hybrid batch: a few vectorised gathers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from actors.scheduling.plan import Slice
from actors.stage.state import RequestState
from kernels.interface import Batch

# Offsets of the packed tensors are multiples of this many int32, so that each starts on 64 bytes.
_ALIGNMENT = 16


@dataclass(slots=True)
class BuiltBatch:
    """The geometry for the kernels and the input tokens; on the host, each slice's row in the
    state, its end position and where its tokens begin along T."""

    geometry: Batch
    tokens_T: torch.Tensor
    rows_S: NDArray[np.intp]
    ends_S: NDArray[np.int32]
    offsets_S1: NDArray[np.int32]


def build_batch(
    state: RequestState, slices: Sequence[Slice], block_size: int, device: torch.device
) -> BuiltBatch:
    """Raises KeyError for unknown requests, ValueError for slices outside their block table."""
    num_slices = len(slices)
    rows_S = np.fromiter((state.row(s.request_id) for s in slices), np.intp, num_slices)
    starts_S = np.fromiter((s.start for s in slices), np.int32, num_slices)
    lengths_S = np.fromiter((s.num_tokens for s in slices), np.int32, num_slices)
    ends_S = starts_S + lengths_S
    query_starts_S1 = np.zeros(num_slices + 1, dtype=np.int32)
    np.cumsum(lengths_S, out=query_starts_S1[1:])
    num_tokens = int(query_starts_S1[-1])
    num_decodes = _leading_decodes(lengths_S)
    max_kv_length = int(ends_S.max())
    num_columns = -(-max_kv_length // block_size)
    if num_columns > state.tables_RB.shape[1]:
        raise ValueError(f"a slice reaches position {max_kv_length}, behind the longest sequence")
    if num_tokens == num_slices:
        rows_T, positions_T = rows_S, starts_S
    else:
        rows_T = np.repeat(rows_S, lengths_S)
        positions_T = np.arange(num_tokens, dtype=np.int32)
        positions_T += np.repeat(starts_S - query_starts_S1[:-1], lengths_S)
    tokens_T = state.tokens_RP[rows_T, positions_T]
    blocks_T, offsets_T = np.divmod(positions_T, np.int32(block_size))
    slots_T = state.tables_RB[rows_T, blocks_T] * np.int32(block_size) + offsets_T
    tables_SB = state.tables_RB[rows_S, :num_columns]
    packed = _to_device(
        (positions_T, query_starts_S1, starts_S, lengths_S, slots_T, tokens_T, tables_SB), device
    )
    geometry = Batch(
        positions_T=packed[0],
        query_starts_S1=packed[1],
        starts_S=packed[2],
        lengths_S=packed[3],
        slot_mapping_T=packed[4],
        block_tables_SB=packed[6],
        num_decodes=num_decodes,
        max_length=int(lengths_S.max()),
        max_kv_length=max_kv_length,
    )
    return BuiltBatch(geometry, packed[5], rows_S, ends_S, query_starts_S1)


def _leading_decodes(lengths_S: NDArray[np.int32]) -> int:
    longer = np.flatnonzero(lengths_S != 1)
    return int(longer[0]) if longer.size else len(lengths_S)


def _to_device(arrays: Sequence[NDArray[np.int32]], device: torch.device) -> list[torch.Tensor]:
    """On CPU the arrays themselves; on a GPU one transfer for all of them."""
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(a)) for a in arrays]
    offsets = np.cumsum([0, *(-(-a.size // _ALIGNMENT) * _ALIGNMENT for a in arrays)])
    host = torch.empty(int(offsets[-1]), dtype=torch.int32, pin_memory=True)
    flat = host.numpy()
    for array, offset in zip(arrays, offsets, strict=False):
        flat[offset : offset + array.size] = array.ravel()
    on_device = host.to(device, non_blocking=True)
    return [
        on_device[offset : offset + array.size].view(array.shape)
        for array, offset in zip(arrays, offsets, strict=False)
    ]
