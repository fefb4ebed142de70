"""The states of layers without attention, two rows for each row of the persistent batch.

A step reads one of the two and writes the other: executed again after a failure, it finds what it
read. States begin at position 0 only, so requests that restart are computed from their first token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from actors.stage.host_batch import HostBatch
from kernels.interface import Batch
from kernels.recurrence import Mixer, StateLayer, StateRows
from kernels.upload import upload


class RecurrentStates:
    """layers: of each mixer of this rank. On a CPU, memory is taken as rows are used."""

    def __init__(self, mixers: Sequence[Mixer], num_requests: int, device: torch.device) -> None:
        """Raises ValueError naming the setting if the device has no room."""
        self._device = device
        self._written_R: NDArray[np.int32] = np.zeros(num_requests, np.int32)  # 0 or 1
        self._step_id = -1
        try:
            self.layers: list[StateLayer] = [
                mixer.allocate(2 * num_requests, device) for mixer in mixers
            ]
        except RuntimeError as error:  # torch's, of several lines
            first = str(error).splitlines()[0]
            raise ValueError(f"scheduler.max_requests: {first}") from error

    def attach(self, step_id: int, host: HostBatch, batch: Batch) -> None:
        """Say in the batch which rows this step reads and writes. Raises ValueError for a row of
        the persistent batch beyond those that there are states for."""
        rows_S = host.rows_S
        if rows_S.max() >= len(self._written_R):
            raise ValueError(f"{rows_S.max() + 1} requests; {len(self._written_R)} have states")
        if step_id != self._step_id:
            self._written_R[rows_S] ^= 1
            self._step_id = step_id
        writes_S = 2 * rows_S.astype(np.int32) + self._written_R[rows_S]
        reads_S = np.where(host.starts_S == 0, np.int32(-1), writes_S ^ 1)
        batch.states = StateRows(
            query_starts_S1=batch.query_starts_S1,
            reads_S=upload(reads_S, self._device),
            writes_S=upload(writes_S, self._device),
            num_decodes=host.num_decodes,
        )
