"""What a stage remembers of its requests, in flat arrays: one row per running request.

The scheduler's plans carry only changes; everything else a batch needs is looked up here with a
few vectorised gathers, so a batch costs the same few microseconds whatever its requests' lengths.

Every write goes to a position, never to an end: applying a plan twice leaves the same state.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from actors.scheduling.plan import RequestStart, StepPlan
from actors.scheduling.request import SamplingParams
from kernels.torch_sampling import SamplingRows


@dataclass(slots=True)
class RowInfo:
    """What does not fit an array. appended_step and blocks_before rewind a repeated plan."""

    request_id: int
    sampling: SamplingParams
    pooling: str | None
    num_blocks: int = 0
    appended_step: int = -1
    blocks_before: int = 0


class Columns:
    """What a step asks of every row, one array each, so that it can ask all rows at once.

    adjusts_R: logits need more than temperature and cuts (bias, penalties, grammar).
    logprobs_R, prompt_logprobs_R: alternatives asked for; -1: none wanted.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_prompt_R: NDArray[np.int32] = np.zeros(num_rows, np.int32)
        self.min_tokens_R: NDArray[np.int32] = np.zeros(num_rows, np.int32)
        self.adjusts_R: NDArray[np.bool_] = np.zeros(num_rows, np.bool_)
        self.pools_R: NDArray[np.bool_] = np.zeros(num_rows, np.bool_)
        self.logprobs_R: NDArray[np.int32] = np.zeros(num_rows, np.int32)
        self.prompt_logprobs_R: NDArray[np.int32] = np.zeros(num_rows, np.int32)
        self.temperature_R: NDArray[np.float32] = np.zeros(num_rows, np.float32)
        self.top_k_R: NDArray[np.int32] = np.zeros(num_rows, np.int32)
        self.top_p_R: NDArray[np.float32] = np.zeros(num_rows, np.float32)
        self.min_p_R: NDArray[np.float32] = np.zeros(num_rows, np.float32)
        self.seed_R: NDArray[np.int64] = np.zeros(num_rows, np.int64)

    def put(self, row: int, start: RequestStart) -> None:
        p = start.sampling
        self.num_prompt_R[row] = start.num_prompt_tokens
        self.min_tokens_R[row] = p.min_tokens if p.stop_token_ids else 0
        self.adjusts_R[row] = bool(
            p.logit_bias
            or p.grammar is not None
            or p.repetition_penalty != 1.0
            or p.presence_penalty != 0.0
            or p.frequency_penalty != 0.0
        )
        self.pools_R[row] = start.pooling is not None
        self.logprobs_R[row] = -1 if p.logprobs is None else p.logprobs
        self.prompt_logprobs_R[row] = -1 if p.prompt_logprobs is None else p.prompt_logprobs
        self.temperature_R[row] = p.temperature
        self.top_k_R[row] = p.top_k
        self.top_p_R[row] = p.top_p
        self.min_p_R[row] = p.min_p
        self.seed_R[row] = p.seed

    def draws(self, rows_S: NDArray[np.intp], positions_S: NDArray[np.int64]) -> SamplingRows:
        """How these rows draw the tokens that will stand at these positions."""
        return SamplingRows(
            temperature_S=self.temperature_R[rows_S],
            top_k_S=self.top_k_R[rows_S],
            top_p_S=self.top_p_R[rows_S],
            min_p_S=self.min_p_R[rows_S],
            seed_S=self.seed_R[rows_S],
            position_S=positions_S,
        )

    def grown(self, num_rows: int) -> Columns:
        """The same rows and more behind them."""
        larger = Columns(num_rows)
        for name, values in vars(self).items():
            getattr(larger, name)[: len(values)] = values
        return larger


class RequestState:
    """Mirrored requests. tokens_RP[row, position] and tables_RB[row, block index].

    Invariants: a row is in `_free` or in `_rows`, never both; table entries from num_blocks on
    are 0; tokens are valid up to the last position started, fed or sampled.
    """

    def __init__(self, max_requests: int, max_model_len: int, block_size: int) -> None:
        self._max_model_len = max_model_len
        self._block_size = block_size
        self._width = -(-max_model_len // block_size)
        self.tokens_RP: NDArray[np.int32] = np.zeros((0, max_model_len + 1), dtype=np.int32)
        self.tables_RB: NDArray[np.int32] = np.zeros((0, self._width), dtype=np.int32)
        self.columns = Columns(0)
        self._rows: dict[int, int] = {}
        self._info: dict[int, RowInfo] = {}
        self._free: list[int] = []
        self._grow(max(1, max_requests))

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._rows

    def row(self, request_id: int) -> int:
        """Raises KeyError with a clear message for a request that never started here."""
        try:
            return self._rows[request_id]
        except KeyError:
            raise KeyError(f"request {request_id} is not known to this stage") from None

    def info(self, row: int) -> RowInfo:
        return self._info[row]

    def release(self, request_id: int) -> None:
        """Forget a request; unknown ones are forgotten already."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            self.tables_RB[row] = 0
            self._free.append(row)
            del self._info[row]

    def start(self, start: RequestStart) -> None:
        """Enter a request, or set it anew. Raises ValueError where it cannot fit."""
        if len(start.tokens) > self._max_model_len + 1:
            raise ValueError(
                f"request {start.request_id} has {len(start.tokens)} tokens; "
                f"the stage was made for {self._max_model_len}"
            )
        self.release(start.request_id)
        if not self._free:
            self._grow(len(self.tokens_RP))
        row = self._free.pop()
        self._rows[start.request_id] = row
        self._info[row] = RowInfo(start.request_id, start.sampling, start.pooling)
        self.columns.put(row, start)
        self.tokens_RP[row, : len(start.tokens)] = start.tokens
        self._put_blocks(row, 0, start.block_ids)

    def append_blocks(self, step_id: int, request_id: int, block_ids: tuple[int, ...]) -> None:
        """Extend a block table; a second time in the same step repeats, it does not double."""
        info = self._info[self.row(request_id)]
        if info.appended_step != step_id:
            info.appended_step, info.blocks_before = step_id, info.num_blocks
        self._put_blocks(self.row(request_id), info.blocks_before, block_ids)

    def put_tokens(
        self,
        rows_S: NDArray[np.intp],
        positions_S: NDArray[np.int64],
        tokens_S: NDArray[np.int64],
    ) -> None:
        """Set one token per row, each at its own position."""
        self.tokens_RP[rows_S, positions_S] = tokens_S

    def apply(self, plan: StepPlan) -> None:
        """The plan's changes, in its order (block transfers are the cache's part)."""
        for request_id in plan.released:
            self.release(request_id)
        for start in plan.started:
            self.start(start)
        for request_id, block_ids in plan.new_blocks:
            self.append_blocks(plan.step_id, request_id, block_ids)
        for request_id, position, token in plan.fed:
            row = self._rows.get(request_id)
            if row is not None:  # a request gone meanwhile needs it no more
                self.tokens_RP[row, position] = token

    def clear(self) -> None:
        for request_id in list(self._rows):
            self.release(request_id)

    def _put_blocks(self, row: int, first: int, block_ids: tuple[int, ...]) -> None:
        info, end = self._info[row], first + len(block_ids)
        if end > self._width:
            raise ValueError(f"request {info.request_id} has {end} blocks; {self._width} fit a row")
        self.tables_RB[row, first:end] = block_ids
        info.num_blocks = end

    def _grow(self, num_rows: int) -> None:
        first = len(self.tokens_RP)
        for name in ("tokens_RP", "tables_RB"):
            old = getattr(self, name)
            # Fresh zeros rather than a resize: untouched pages cost no memory.
            new = np.zeros((first + num_rows, old.shape[1]), dtype=np.int32)
            new[:first] = old
            setattr(self, name, new)
        self.columns = self.columns.grown(first + num_rows)
        self._free.extend(reversed(range(first, first + num_rows)))
