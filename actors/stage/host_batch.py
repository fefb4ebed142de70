"""One step's batch before it is on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kernels.adapters import HostRuns


class HostStates(NamedTuple):
    """As in `kernels.recurrence.StateRows`; saves_S is -1 where nothing is saved."""

    reads_S: NDArray[np.int32]
    writes_S: NDArray[np.int32]
    saves_S: NDArray[np.int32]
    save_lengths_S: NDArray[np.int32]


@dataclass(slots=True)
class HostBatch:
    """One step's batch on the host. rows_S: each slice's row of the persistent batch. A token is
    drawn for position ends_S[s] where samples_S. adapters: as `runs_of` gives them. states: where
    layers keep them. The rest as in `kernels.interface.Batch`."""

    rows_S: NDArray[np.intp]
    starts_S: NDArray[np.int32]
    lengths_S: NDArray[np.int32]
    ends_S: NDArray[np.int32]
    samples_S: NDArray[np.bool_]
    query_starts_S1: NDArray[np.int32]
    positions_T: NDArray[np.int32]
    tokens_T: NDArray[np.int32]
    slot_mapping_T: NDArray[np.int32]
    num_tokens: int
    num_decodes: int
    max_length: int
    max_kv_length: int
    adapters: HostRuns | None = None
    states: HostStates | None = None
