"""The states of layers without attention, two rows for each row of the persistent batch.

A step reads one of the two and writes the other: executed again after a failure, it finds what it
read. Further rows, one for each request, keep the states of prompts' beginnings, with which later
requests begin (`actors.scheduling.memory.saved_states`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from actors.scheduling.plan import StepPlan
from actors.stage.host_batch import HostBatch
from kernels.interface import Batch
from kernels.recurrence import Mixer, StateLayer, StateRows
from kernels.upload import upload

ROWS_OF_REQUEST = 3


class RecurrentStates:
    """layers: of each mixer of this rank. On a CPU, memory is taken as rows are used."""

    def __init__(self, mixers: Sequence[Mixer], num_requests: int, device: torch.device) -> None:
        """Raises ValueError naming the setting if the device has no room."""
        self._device = device
        self._written_R: NDArray[np.int32] = np.zeros(num_requests, np.int32)  # 0 or 1
        self._first_saved = 2 * num_requests
        self._step_id = -1
        try:
            self.layers: list[StateLayer] = [
                mixer.allocate(ROWS_OF_REQUEST * num_requests, device) for mixer in mixers
            ]
        except RuntimeError as error:  # torch's, of several lines
            first = str(error).splitlines()[0]
            raise ValueError(f"scheduling.max_requests: {first}") from error

    def attach(self, plan: StepPlan, host: HostBatch, batch: Batch) -> None:
        """Say in the batch which rows this step reads, writes and saves to. Raises ValueError for a
        row of the persistent batch beyond those that there are states for."""
        rows_S = host.rows_S
        if rows_S.max() >= len(self._written_R):
            raise ValueError(f"{rows_S.max() + 1} requests; {len(self._written_R)} have states")
        if plan.step_id != self._step_id:
            self._written_R[rows_S] ^= 1
            self._step_id = plan.step_id
        writes_S = 2 * rows_S.astype(np.int32) + self._written_R[rows_S]
        reads_S = np.where(host.starts_S == 0, np.int32(-1), writes_S ^ 1)
        slice_of = {request_id: s for s, (request_id, *_) in enumerate(plan.slices)}
        for start in plan.started:
            if start.state_row is not None and start.request_id in slice_of:
                reads_S[slice_of[start.request_id]] = self._first_saved + start.state_row
        batch.states = StateRows(
            query_starts_S1=batch.query_starts_S1,
            reads_S=upload(reads_S, self._device),
            writes_S=upload(writes_S, self._device),
            num_decodes=host.num_decodes,
        )
        if plan.saved_states:
            saves_S, lengths_S = np.full_like(writes_S, -1), np.zeros_like(writes_S)
            for request_id, position, row in plan.saved_states:
                s = slice_of[request_id]
                saves_S[s] = self._first_saved + row
                lengths_S[s] = position - host.starts_S[s]
            batch.states.saves_S = upload(saves_S, self._device)
            batch.states.save_lengths_S = upload(lengths_S, self._device)
