"""From a plan's slices to the tensors of one hybrid batch: a few vectorised gathers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from actors.scheduling.plan import Slice
from actors.stage.input_batch import RequestState
from kernels.interface import Batch

# Offsets of the packed tensors are multiples of this many int32, so that each starts on 64 bytes.
_ALIGNMENT = 16


@dataclass(slots=True)
class HostBatch:
    """One step's batch on the host. rows_S: each slice's row in the state; its tokens lie along
    T from offsets_S1[s] on and end at position ends_S[s] of the sequence, for which a token is
    drawn where samples_S."""

    rows_S: NDArray[np.intp]
    starts_S: NDArray[np.int32]
    lengths_S: NDArray[np.int32]
    ends_S: NDArray[np.int32]
    samples_S: NDArray[np.bool_]
    offsets_S1: NDArray[np.int32]
    positions_T: NDArray[np.int32]
    tokens_T: NDArray[np.int32]
    slots_T: NDArray[np.int32]
    num_decodes: int
    max_length: int
    max_kv_length: int

    @property
    def num_tokens(self) -> int:
        return len(self.positions_T)


def gather_batch(state: RequestState, slices: Sequence[Slice], block_size: int) -> HostBatch:
    """Raises KeyError for unknown requests, ValueError for slices outside their block table."""
    num_slices = len(slices)
    rows_S = np.fromiter((state.row(s.request_id) for s in slices), np.intp, num_slices)
    starts_S = np.fromiter((s.start for s in slices), np.int32, num_slices)
    lengths_S = np.fromiter((s.num_tokens for s in slices), np.int32, num_slices)
    ends_S = starts_S + lengths_S
    offsets_S1 = np.zeros(num_slices + 1, dtype=np.int32)
    np.cumsum(lengths_S, out=offsets_S1[1:])
    num_tokens = int(offsets_S1[-1])
    max_kv_length = int(ends_S.max())
    if max_kv_length > state.tables_RB.shape[1] * block_size:
        raise ValueError(f"a slice reaches position {max_kv_length}, behind the longest sequence")
    if num_tokens == num_slices:
        rows_T, positions_T = rows_S, starts_S
    else:
        rows_T = np.repeat(rows_S, lengths_S)
        positions_T = np.arange(num_tokens, dtype=np.int32)
        positions_T += np.repeat(starts_S - offsets_S1[:-1], lengths_S)
    blocks_T, within_T = np.divmod(positions_T, np.int32(block_size))
    return HostBatch(
        rows_S=rows_S,
        starts_S=starts_S,
        lengths_S=lengths_S,
        ends_S=ends_S,
        samples_S=np.fromiter((s.samples for s in slices), np.bool_, num_slices),
        offsets_S1=offsets_S1,
        positions_T=positions_T,
        tokens_T=state.tokens_RP[rows_T, positions_T],
        slots_T=state.tables_RB[rows_T, blocks_T] * np.int32(block_size) + within_T,
        num_decodes=_leading_decodes(lengths_S),
        max_length=int(lengths_S.max()),
        max_kv_length=max_kv_length,
    )


def place_batch(
    host: HostBatch, state: RequestState, block_size: int, device: torch.device
) -> tuple[Batch, torch.Tensor]:
    """The geometry for the kernels and the input tokens, on the device."""
    num_columns = -(-host.max_kv_length // block_size)
    packed = _to_device(
        (
            host.positions_T, host.offsets_S1, host.starts_S, host.lengths_S, host.slots_T,
            host.tokens_T, state.tables_RB[host.rows_S, :num_columns],
        ),
        device,
    )  # fmt: skip
    geometry = Batch(
        positions_T=packed[0],
        query_starts_S1=packed[1],
        starts_S=packed[2],
        lengths_S=packed[3],
        slot_mapping_T=packed[4],
        block_tables_SB=packed[6],
        num_decodes=host.num_decodes,
        max_length=host.max_length,
        max_kv_length=host.max_kv_length,
    )
    return geometry, packed[5]


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
