"""Block tables on the device, which change by what has changed.

A step of 64 decodes at 128k positions would copy 2 MB of tables, of which some four numbers are
new. So the tables stay on the device, a row for each of the persistent batch, and a step brings the
entries written since the last one; its own rows are gathered on the device.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.upload import upload


class DeviceTables:
    """A copy of `InputBatch.block_tables_RB`, updated by `changes` or `leveled`.

    Entries after those in use keep their old value: an existing block, which is not read.
    """

    def __init__(self, host_RB: NDArray[np.int32], device: torch.device) -> None:
        """host_RB: the current tables; later changes are reported by `note`."""
        self.num_rows, self._width = host_RB.shape
        self._device = device
        # One more row, which padding reads and writes.
        self.block_tables_RB = torch.zeros((self.num_rows + 1, self._width), dtype=torch.int32)
        self.block_tables_RB[: self.num_rows] = torch.from_numpy(host_RB)
        self.block_tables_RB = self.block_tables_RB.to(device)
        self._spans: list[tuple[int, int, int]] = []

    @property
    def nowhere(self) -> int:
        """Index of the entry that unused edits write to."""
        return self.num_rows * self._width

    def note(self, row: int, first: int, end: int) -> None:
        """Entries [first, end) of a row have changed on the host."""
        if row < self.num_rows and first < end:
            self._spans.append((row, first, end))

    def changes(
        self, host_RB: NDArray[np.int32], most: int
    ) -> tuple[NDArray[np.intp], NDArray[np.int32]]:
        """What has changed since `settle`, for the caller to write: at most `most` of it, more is
        written here. Where each goes, in entries from the first, and what it is; an entry that
        stands twice has the same value."""
        if not self._spans:
            return np.zeros(0, np.intp), np.zeros(0, np.int32)
        at = np.concatenate(
            [np.arange(row * self._width + a, row * self._width + b) for row, a, b in self._spans]
        )
        blocks = host_RB.ravel()[at]
        if len(at) > most:
            self._write(at[most:], blocks[most:])
        return at[:most], blocks[:most]

    def settle(self) -> None:
        """All changes are written, or queued to be: until then a step that fails loses none, as
        the next one brings them again."""
        self._spans = []

    def leveled(
        self, host_RB: NDArray[np.int32], rows_S: torch.Tensor, num_columns: int
    ) -> torch.Tensor:
        """The tables of some rows after all changes, to a width; rows_S is on the device."""
        self.changes(host_RB, 0)
        self.settle()
        return self.block_tables_RB[:, :num_columns].index_select(0, rows_S)

    def edit(self, at_E: torch.Tensor, blocks_E: torch.Tensor) -> None:
        """Write what `changes` returned, from the device; waits for nothing."""
        self.block_tables_RB.view(-1).index_copy_(0, at_E.long(), blocks_E)

    def _write(self, at: NDArray[np.intp], blocks: NDArray[np.int32]) -> None:
        both = upload(np.stack((at.astype(np.int32), blocks)), self._device)
        self.edit(both[0], both[1])
