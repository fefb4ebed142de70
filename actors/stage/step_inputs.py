"""The static inputs of captured steps: one device buffer, filled by one transfer."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from actors.stage.cuda.device_tables import DeviceTables
from actors.stage.drafts import Draws
from actors.stage.host_batch import HostBatch, HostStates
from kernels.adapters import AdapterRuns, most_tiles, tiles_of
from kernels.interface import Batch
from kernels.recurrence import StateRows

# Parts begin at multiples of this many int32: 64 bytes.
_ALIGNMENT = 16
_INT32_PER_DRAW = 6  # three float64


class GraphSize(NamedTuple):
    """decodes: every slice holds at most one token, so num_tokens == num_slices == num_draws.
    adapted: rows may have adapters."""

    num_tokens: int
    num_slices: int
    num_draws: int
    decodes: bool
    adapted: bool = False


class AdapterTiling(NamedTuple):
    """How a step's tokens are cut into tiles of one adapter each (`kernels.adapters.tiles_of`).

    num_slots: of the stage. tile_rows: tokens of a tile.
    """

    num_slots: int
    tile_rows: int

    def max_tiles(self, num_tokens: int) -> int:
        """The most tiles of a step of num_tokens."""
        return most_tiles(num_tokens, self.num_slots, self.tile_rows)


class StepInputs:
    """Buffers for steps up to the largest size.

    A step brings changes of block tables for as many entries as it may have slices (a decode adds
    one block at most); where there are more, they go ahead by a transfer of their own.
    """

    def __init__(
        self,
        largest: GraphSize,
        tiling: AdapterTiling,
        tables: DeviceTables,
        device: torch.device,
        has_states: bool = False,
    ) -> None:
        """has_states: layers keep states, of which rows are read and written."""
        max_tokens, max_slices, max_draws = largest[:3]
        adapted_tokens = max_tokens if tiling.num_slots else 0
        sizes = {
            "positions": max_tokens,
            "tokens": max_tokens,
            "slot_mapping": max_tokens,
            "query_starts": max_slices + 1,
            "starts": max_slices,
            "lengths": max_slices,
            "draw_rows": max_draws,
            "batch_rows": max_draws,
            "draws": max_draws * _INT32_PER_DRAW,
            "table_rows": max_slices,
            "edits_at": max_slices,
            "edits": max_slices,
            "adapter_rows": adapted_tokens,
            "adapter_tiles": 3 * tiling.max_tiles(adapted_tokens),
            **dict.fromkeys(HostStates._fields, max_slices * has_states),
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
        self._tiling = tiling
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
        self.draw_rows_S = views["draw_rows"]
        self.batch_rows_S = views["batch_rows"]
        self.draws_S3 = views["draws"].view(torch.float64).view(max_draws, 3)
        self._states = [views[name] for name in HostStates._fields] if has_states else []
        self._adapter_rows_N = views["adapter_rows"]
        self._adapter_tiles_B3 = views["adapter_tiles"].view(-1, 3)

    def batch(self, size: GraphSize, max_model_len: int) -> Batch:
        """The geometry of one size, over the static buffers."""
        num_tokens, num_slices = size[:2]
        return Batch(
            positions_T=self._positions_T[:num_tokens],
            query_starts_S1=self._query_starts_S1[: num_slices + 1],
            starts_S=self._starts_S[:num_slices],
            lengths_S=self._lengths_S[:num_slices],
            block_tables_SB=self._block_tables_SB[:num_slices],
            slot_mapping_T=self._slot_mapping_T[:num_tokens],
            num_decodes=num_slices,
            max_length=1 if size.decodes else num_tokens,
            max_kv_length=max_model_len,
            captured=True,
            adapters=self._runs(num_tokens) if size.adapted else None,
            states=self._state_rows(num_slices) if self._states else None,
        )

    def _state_rows(self, num_slices: int) -> StateRows:
        reads_S, writes_S, saves_S, save_lengths_S = (rows[:num_slices] for rows in self._states)
        return StateRows(
            query_starts_S1=self._query_starts_S1[: num_slices + 1],
            reads_S=reads_S,
            writes_S=writes_S,
            num_decodes=num_slices,
            saves_S=saves_S,
            save_lengths_S=save_lengths_S,
        )

    def _runs(self, num_tokens: int) -> AdapterRuns:
        nothing = np.zeros(0, np.int32)
        rows_N = self._adapter_rows_N[:num_tokens]
        tiles_B3 = self._adapter_tiles_B3[: self._tiling.max_tiles(num_tokens)]
        return AdapterRuns(rows_N, nothing, nothing, tiles_B3, captured=True)

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
        size: GraphSize,
        host: HostBatch,
        block_tables_RB: NDArray[np.int32],
        draws: Draws | None,
        draws_S3: NDArray[np.float64] | None,
        nowhere: int,
    ) -> None:
        """Write a step of this (padded) size and start its transfer.

        block_tables_RB: the persistent batch's. draws, draws_S3: where the stage draws, and the
        parameters. nowhere: the row that takes tokens which no step finds on the device.

        Waits for the transfer of the step before, which reads the same host memory.
        """
        if self._copied is not None:
            self._copied.synchronize()
        num_tokens, num_slices, num_draws = size[:3]
        T = host.num_tokens
        self._put("positions", host.positions_T, num_tokens, 0)
        self._put("tokens", host.tokens_T, num_tokens, 0)
        self._put("slot_mapping", host.slot_mapping_T, num_tokens, -1)
        self._put("query_starts", host.query_starts_S1, num_slices + 1, T)
        self._put("starts", host.starts_S, num_slices, 0)
        self._put("lengths", host.lengths_S, num_slices, 0)
        if draws is not None and draws_S3 is not None:
            self._put("draw_rows", draws.rows_N, num_draws, 0)
            # Which draw of a slice with drafts is its last token, the host finds.
            batch_rows_S = np.where(draws.drafted_N, nowhere, host.rows_S[draws.slices_N])
            self._put("batch_rows", batch_rows_S, num_draws, nowhere)
            packed = draws_S3.view(np.int32).ravel()
            self._put("draws", packed, num_draws * _INT32_PER_DRAW, 0)
        self._put("table_rows", host.rows_S, num_slices, self._tables.num_rows)
        if host.states is not None:
            for name, rows_S in host.states._asdict().items():
                self._put(name, rows_S, num_slices, 0)  # of no token: nothing is read or written
        at, blocks = self._tables.changes(block_tables_RB, self._max_slices)
        self._put("edits_at", at, self._max_slices, self._tables.nowhere)
        self._put("edits", blocks, self._max_slices, 0)
        if size.adapted and host.adapters is not None:
            rows_N, starts, slots = host.adapters
            tiles = tiles_of(starts, slots, self._tiling.tile_rows).ravel()
            self._put("adapter_rows", rows_N, num_tokens, 0)
            self._put("adapter_tiles", tiles, 3 * self._tiling.max_tiles(num_tokens), 0)
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def settle(self) -> None:
        """The graph that reads these inputs is queued."""
        self._tables.settle()

    def _put(self, name: str, values: NDArray[Any], size: int, padding: int) -> None:
        target = self._arrays[name]
        target[: len(values)] = values
        target[len(values) : size] = padding
