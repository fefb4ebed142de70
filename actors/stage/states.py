"""The states of layers without attention, two rows for each row of the persistent batch.

A step reads the one that is of the position where its slice starts, and writes the other: executed
again, it finds what it read. Further rows, one for each request, keep the states of prompts'
beginnings, with which later requests begin (`actors.scheduling.memory.saved_states`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from actors.scheduling.plan import StepPlan
from actors.stage.host_batch import HostBatch, HostStates
from kernels.interface import Batch
from kernels.recurrence import Mixer, StateLayer, StateRows
from kernels.upload import upload

ROWS_OF_REQUEST = 3


class RecurrentStates:
    """layers: of each mixer of this rank. On a CPU, memory is taken as rows are used."""

    def __init__(self, mixers: Sequence[Mixer], num_requests: int, device: torch.device) -> None:
        """Raises ValueError naming the setting if the device has no room."""
        # Of which position each of the two rows is; -1: of none.
        self._position_R2: NDArray[np.int32] = np.full((num_requests, 2), -1, np.int32)
        self._first_saved = 2 * num_requests
        try:
            self.layers: list[StateLayer] = [
                mixer.allocate(ROWS_OF_REQUEST * num_requests, device) for mixer in mixers
            ]
        except (OSError, RuntimeError) as error:  # torch's, of several lines
            first = str(error).splitlines()[0]
            raise ValueError(f"scheduling.max_requests: {first}") from error

    def free(self) -> int:
        """Give up the memory, whoever still holds the layers; returns how many bytes it was."""
        freed_bytes = 0
        for layer in self.layers:
            freed_bytes += layer.conv_RJC.nbytes
            layer.conv_RJC = layer.conv_RJC.new_empty(0)
            if layer.matrix_RNFD is not None:
                freed_bytes += layer.matrix_RNFD.nbytes
                layer.matrix_RNFD = None
        return freed_bytes

    def note(self, plan: StepPlan, host: HostBatch) -> None:
        """Say in the batch which rows the step reads, writes and saves to. Raises ValueError for a
        row of the persistent batch beyond those that there are states for."""
        rows_S, starts_S = host.rows_S, host.starts_S
        if rows_S.max() >= len(self._position_R2):
            raise ValueError(f"{rows_S.max() + 1} requests; {len(self._position_R2)} have states")
        sides_S = (self._position_R2[rows_S, 1] == starts_S).astype(np.int32)
        reads_S = 2 * rows_S.astype(np.int32) + sides_S
        writes_S = reads_S ^ 1
        slice_of = {request_id: s for s, (request_id, *_) in enumerate(plan.slices)}
        reads_S[starts_S == 0] = -1
        for start in plan.started:
            if start.state_row is not None:
                reads_S[slice_of[start.request_id]] = self._first_saved + start.state_row
        # What a request before left in a row that this one does not read is of no position of it.
        is_own_S = reads_S >> 1 == rows_S
        self._position_R2[rows_S[~is_own_S]] = -1
        self._position_R2[rows_S, writes_S & 1] = host.ends_S
        saves_S, save_lengths_S = np.full_like(writes_S, -1), np.zeros_like(writes_S)
        for request_id, position, row in plan.saved_states:
            s = slice_of[request_id]
            saves_S[s], save_lengths_S[s] = self._first_saved + row, position - starts_S[s]
        host.states = HostStates(reads_S, writes_S, saves_S, save_lengths_S)


class DraftStates:
    """Which rows a draft model's layers read and write: three of each row of the persistent batch.

    One is kept, of a position whose tokens are known. A step begins with it, keeps another, and
    guesses in the rest.
    """

    def __init__(self, num_requests: int) -> None:
        self.position_R: NDArray[np.int32] = np.zeros(num_requests, np.int32)  # of the kept one
        self._kept_R: NDArray[np.int32] = np.zeros(num_requests, np.int32)  # 0 to 2, as the next
        self._guessed_R: NDArray[np.int32] = np.zeros(num_requests, np.int32)

    def begin(self, rows_S: NDArray[np.intp], starts_S: NDArray[np.int32],
              positions_S: NDArray[np.int32]) -> HostStates:  # fmt: skip
        """Of slices that begin where states are kept, or at 0, and on which the states of
        positions_S are kept from now on."""
        kept_S = self._kept_R[rows_S]
        guessed_S, saved_S = (kept_S + 1) % 3, (kept_S + 2) % 3
        lengths_S = positions_S - starts_S
        self._guessed_R[rows_S] = guessed_S
        self._kept_R[rows_S] = np.where(lengths_S > 0, saved_S, kept_S)
        self.position_R[rows_S] = 0  # until it is computed: see `keep`
        first_S = ROWS_OF_REQUEST * rows_S.astype(np.int32)
        reads_S = np.where(starts_S > 0, first_S + kept_S, np.int32(-1))
        saves_S = np.where(lengths_S > 0, first_S + saved_S, np.int32(-1))
        return HostStates(reads_S, first_S + guessed_S, saves_S, lengths_S)

    def keep(self, rows_S: NDArray[np.intp], positions_S: NDArray[np.int32]) -> None:
        """What `begin` said of these has been computed."""
        self.position_R[rows_S] = positions_S

    def guess(self, rows_S: NDArray[np.intp]) -> HostStates:
        """Of one more token each, after the slices before."""
        guessed_S = self._guessed_R[rows_S]
        other_S = 3 - self._kept_R[rows_S] - guessed_S
        self._guessed_R[rows_S] = other_S
        first_S = ROWS_OF_REQUEST * rows_S.astype(np.int32)
        none_S = np.full_like(first_S, -1)
        return HostStates(first_S + guessed_S, first_S + other_S, none_S, np.zeros_like(none_S))


def state_rows(states: HostStates, batch: Batch) -> StateRows:
    """The rows on the batch's device."""
    device = batch.starts_S.device
    reads_S, writes_S, saves_S, save_lengths_S = (upload(rows_S, device) for rows_S in states)
    saves = (states.saves_S >= 0).any()
    return StateRows(
        query_starts_S1=batch.query_starts_S1,
        reads_S=reads_S,
        writes_S=writes_S,
        num_decodes=batch.num_decodes,
        saves_S=saves_S if saves else None,
        save_lengths_S=save_lengths_S if saves else None,
    )
