"""The static inputs of captured steps: one device buffer, filled by one transfer."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from actors.stage.input_batch import HostBatch
from kernels.interface import Batch

# Parts begin at multiples of this many int32: 64 bytes.
_ALIGNMENT = 16
_INT32_PER_DRAW = 6  # three float64


class StepInputs:
    """Buffers for at most `max_tokens` tokens in `max_slices` slices.

    Block tables lie last, so that a step transfers only the rows it uses.
    """

    def __init__(
        self, max_tokens: int, max_slices: int, table_width: int, device: torch.device
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
            "block_tables": max_slices * table_width,
        }
        padded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes.values()]
        offsets = list(accumulate(padded, initial=0))
        self._on_gpu = device.type == "cuda"
        self._host = torch.zeros(offsets[-1], dtype=torch.int32, pin_memory=self._on_gpu)
        self._device = torch.zeros(offsets[-1], dtype=torch.int32, device=device)
        # Recorded behind each transfer: when it is done, the host memory may be written.
        self._copied = torch.cuda.Event() if self._on_gpu else None  # type: ignore[no-untyped-call]
        flat = self._host.numpy()
        self._arrays: dict[str, NDArray[np.int32]] = {}
        views: dict[str, torch.Tensor] = {}
        for (name, size), offset in zip(sizes.items(), offsets, strict=False):
            self._arrays[name] = flat[offset : offset + size]
            views[name] = self._device[offset : offset + size]
        self._table_offset = offsets[-2]
        self._table_width = table_width
        self._positions_T = views["positions"]
        self._slot_mapping_T = views["slot_mapping"]
        self._query_starts_S1 = views["query_starts"]
        self._starts_S = views["starts"]
        self._lengths_S = views["lengths"]
        self._block_tables_SB = views["block_tables"].view(max_slices, table_width)
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

    def clear(self) -> None:
        """Make all of it padding: no slice has a token, no token a slot."""
        for values in self._arrays.values():
            values[:] = 0
        self._arrays["slot_mapping"][:] = -1
        self._device.copy_(self._host)

    def fill(
        self,
        host: HostBatch,
        block_tables_SB: NDArray[np.int32],
        draws_S3: NDArray[np.float64] | None,
        num_tokens: int,
        num_slices: int,
        nowhere: int,
    ) -> None:
        """Write a step of this (padded) size and start its transfer.

        nowhere: the row that takes the tokens of slices without a draw.

        Waits for the transfer of the step before, which reads the same host memory.
        """
        if self._copied is not None:
            self._copied.synchronize()
        T, S = host.num_tokens, len(host.rows_S)
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
        self._arrays["block_tables"][: S * self._table_width] = block_tables_SB.ravel()
        used = self._table_offset + S * self._table_width
        self._device[:used].copy_(self._host[:used], non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def _put(self, name: str, values: NDArray[np.int32], size: int, padding: int) -> None:
        target = self._arrays[name]
        target[: len(values)] = values
        target[len(values) : size] = padding
