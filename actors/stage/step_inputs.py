"""The static inputs of captured steps: one device buffer, filled by one transfer."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from actors.stage.cuda.device_tables import DeviceTables
from actors.stage.host_batch import HostBatch
from kernels.interface import Batch

# Parts begin at multiples of this many int32: 64 bytes.
_ALIGNMENT = 16
_INT32_PER_DRAW = 6  # three float64


class StepInputs:
    """Buffers for at most `max_tokens` tokens in `max_slices` slices.

    A step brings changes of block tables for as many entries as it may have slices (a decode adds
    one block at most); where there are more, they go ahead by a transfer of their own.
    """

    def __init__(
        self, max_tokens: int, max_slices: int, tables: DeviceTables, device: torch.device
    ) -> None:
        sizes = {
            "positions": max_tokens,
            "tokens": max_tokens,
            "slot_mapping": max_tokens,
            "query_starts": max_slices + 1,
            "starts": max_slices,
            "lengths": max_slices,
            "last_rows": max_slices,
            "batch_rows": max_slices,
            "draws": max_slices * _INT32_PER_DRAW,
            "table_rows": max_slices,
            "edits_at": max_slices,
            "edits": max_slices,
        }
        padded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes.values()]
        offsets = list(accumulate(padded, initial=0))
        self._on_gpu = device.type == "cuda"
        self._host = torch.zeros(offsets[-1], dtype=torch.int32, pin_memory=self._on_gpu)
        self._device = torch.zeros(offsets[-1], dtype=torch.int32, device=device)
        # Recorded after each transfer: once it is done, the host memory may be written.
        # A waiting thread sleeps.
        self._copied = torch.cuda.Event(blocking=True) if self._on_gpu else None  # type: ignore[no-untyped-call]
        flat = self._host.numpy()
        self._arrays: dict[str, NDArray[np.int32]] = {}
        views: dict[str, torch.Tensor] = {}
        for (name, size), offset in zip(sizes.items(), offsets, strict=False):
            self._arrays[name] = flat[offset : offset + size]
            views[name] = self._device[offset : offset + size]
        self._max_slices = max_slices
        self._tables = tables
        self._positions_T = views["positions"]
        self._slot_mapping_T = views["slot_mapping"]
        self._query_starts_S1 = views["query_starts"]
        self._starts_S = views["starts"]
        self._lengths_S = views["lengths"]
        self._table_rows_S = views["table_rows"]
        self._edits_at_E = views["edits_at"]
        self._edits_E = views["edits"]
        width = tables.block_tables_RB.shape[1]
        self._block_tables_SB = torch.zeros(max_slices, width, dtype=torch.int32, device=device)
        self.tokens_T = views["tokens"]
        self.last_rows_S = views["last_rows"]
        self.batch_rows_S = views["batch_rows"]
        self.draws_S3 = views["draws"].view(torch.float64).view(max_slices, 3)

    def batch(self, num_tokens: int, num_slices: int, decodes: bool, max_model_len: int) -> Batch:
        """The geometry of one size, over the static buffers."""
        return Batch(
            positions_T=self._positions_T[:num_tokens],
            query_starts_S1=self._query_starts_S1[: num_slices + 1],
            starts_S=self._starts_S[:num_slices],
            lengths_S=self._lengths_S[:num_slices],
            block_tables_SB=self._block_tables_SB[:num_slices],
            slot_mapping_T=self._slot_mapping_T[:num_tokens],
            num_decodes=num_slices,
            max_length=1 if decodes else num_tokens,
            max_kv_length=max_model_len,
            captured=True,
        )

    def place_tables(self, num_slices: int) -> None:
        """Bring the tables level and gather the slices' rows: the first thing in a graph."""
        self._tables.edit(self._edits_at_E, self._edits_E)
        torch.index_select(
            self._tables.block_tables_RB,
            0,
            self._table_rows_S[:num_slices],
            out=self._block_tables_SB[:num_slices],
        )

    def clear(self) -> None:
        """Make all of it padding: no slice has a token, no token a slot."""
        for values in self._arrays.values():
            values[:] = 0
        self._arrays["slot_mapping"][:] = -1
        self._arrays["table_rows"][:] = self._tables.num_rows
        self._arrays["edits_at"][:] = self._tables.nowhere
        self._device.copy_(self._host)

    def fill(
        self,
        host: HostBatch,
        block_tables_RB: NDArray[np.int32],
        draws_S3: NDArray[np.float64] | None,
        num_tokens: int,
        num_slices: int,
        nowhere: int,
    ) -> None:
        """Write a step of this (padded) size and start its transfer.

        block_tables_RB: the persistent batch's. nowhere: the row that takes the tokens of slices
        without a draw.

        Waits for the transfer of the step before, which reads the same host memory.
        """
        if self._copied is not None:
            self._copied.synchronize()
        T = host.num_tokens
        self._put("positions", host.positions_T, num_tokens, 0)
        self._put("tokens", host.tokens_T, num_tokens, 0)
        self._put("slot_mapping", host.slot_mapping_T, num_tokens, -1)
        self._put("query_starts", host.query_starts_S1, num_slices + 1, T)
        self._put("starts", host.starts_S, num_slices, 0)
        self._put("lengths", host.lengths_S, num_slices, 0)
        self._put("last_rows", host.query_starts_S1[1:] - 1, num_slices, 0)
        batch_rows_S = np.where(host.samples_S, host.rows_S, nowhere).astype(np.int32)
        self._put("batch_rows", batch_rows_S, num_slices, nowhere)
        if draws_S3 is not None:
            draws = draws_S3.view(np.int32).ravel()
            self._put("draws", draws, num_slices * _INT32_PER_DRAW, 0)
        self._put("table_rows", host.rows_S, num_slices, self._tables.num_rows)
        at, blocks = self._tables.pop_changes(block_tables_RB, self._max_slices)
        self._put("edits_at", at, self._max_slices, self._tables.nowhere)
        self._put("edits", blocks, self._max_slices, 0)
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def _put(self, name: str, values: NDArray[Any], size: int, padding: int) -> None:
        target = self._arrays[name]
        target[: len(values)] = values
        target[len(values) : size] = padding
