"""The stage's persistent batch, in flat arrays: one row per running request (suffix R).

The scheduler's plans carry only changes; everything else that a step needs is looked up here with
a few vectorized gathers, so building a batch takes microseconds for requests of any length.

Every write goes to a position, never to an end: applying a plan twice leaves the same batch.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from actors.scheduling.plan import RequestStart, SliceRow, StepPlan
from actors.scheduling.request import SamplingParams
from actors.stage.cuda.device_tables import DeviceTables
from actors.stage.host_batch import HostBatch
from kernels.adapters import AdapterRuns, HostRuns, runs_of
from kernels.interface import Batch
from kernels.sampling import SamplingRows
from kernels.upload import upload, upload_all


@dataclass(slots=True)
class RowInfo:
    """Data not in arrays. A repeated plan goes back to appended_step, blocks_before."""

    request_id: int
    sampling: SamplingParams
    pooling: str | None
    appended_step: int = -1
    blocks_before: int = 0


class _Rows(dict[int, int]):
    def __missing__(self, request_id: int) -> int:
        raise KeyError(f"request {request_id} is not known to this stage")


class Columns:
    """Request parameters, one array each, so that a step reads those of all its rows at once.

    num_blocks_R: length of the block table; 0 in a free row.
    adjusts_R: logits are changed before the draw (bias, penalties, grammar).
    adapter_R: slot of the adapter, counted from 1.
    logprobs_R, prompt_logprobs_R: alternatives asked for; -1: no log-probabilities.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_blocks_R: NDArray[np.int32] = np.zeros(num_rows, np.int32)
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
        self.adapter_R: NDArray[np.int32] = np.zeros(num_rows, np.int32)

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
        self.adapter_R[row] = start.adapter

    def draws(self, rows_S: NDArray[np.intp], positions_S: NDArray[np.int64]) -> SamplingRows:
        """The sampling parameters of these rows, for tokens at these positions."""
        return SamplingRows(
            temperature_S=self.temperature_R[rows_S],
            top_k_S=self.top_k_R[rows_S],
            top_p_S=self.top_p_R[rows_S],
            min_p_S=self.min_p_R[rows_S],
            seed_S=self.seed_R[rows_S],
            position_S=positions_S,
        )

    def grown(self, num_rows: int) -> Columns:
        """These rows, followed by free ones, num_rows in all."""
        larger = Columns(num_rows)
        for name, values in vars(self).items():
            getattr(larger, name)[: len(values)] = values
        return larger


class InputBatch:
    """The running requests. tokens_RP[row, position] and block_tables_RB[row, block index].

    Invariants: a row is in `_free` or in `_rows`, never both; block table entries after the blocks
    in use are 0; tokens are valid up to the last position started, fed or sampled (drafts, and
    draws after wrong ones, may follow: they are overwritten before they are read).
    """

    def __init__(
        self, max_requests: int, max_model_len: int, block_size: int, adapters: Container[int] = ()
    ) -> None:
        self.max_model_len = max_model_len
        self._adapters = adapters  # slots that are filled, counted from 1
        self._block_size = block_size
        self._width = -(-max_model_len // block_size)
        self.tokens_RP: NDArray[np.int32] = np.zeros((0, max_model_len + 1), dtype=np.int32)
        self.block_tables_RB: NDArray[np.int32] = np.zeros((0, self._width), dtype=np.int32)
        self.columns = Columns(0)
        self._device_tables: DeviceTables | None = None
        self._rows = _Rows()
        self._info: dict[int, RowInfo] = {}
        self._free: list[int] = []
        self._grow(max(1, max_requests))

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._rows

    def row(self, request_id: int) -> int:
        """A request's row; raises KeyError for a request that was never started here."""
        return self._rows[request_id]

    def info(self, row: int) -> RowInfo:
        return self._info[row]

    def tables_on(self, device: torch.device) -> DeviceTables:
        """The block tables of the rows there are now, kept on a device from here on."""
        if self._device_tables is None:
            self._device_tables = DeviceTables(self.block_tables_RB, device)
        return self._device_tables

    def release(self, request_id: int) -> None:
        """Forget a request; nothing happens for one that is not here."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            self.block_tables_RB[row] = self.columns.num_blocks_R[row] = 0
            self._free.append(row)
            del self._info[row]

    def start(self, start: RequestStart) -> None:
        """Add a request, or start it again. Raises ValueError if it does not fit."""
        if len(start.tokens) > self.max_model_len + 1:
            raise ValueError(
                f"request {start.request_id} has {len(start.tokens)} tokens; "
                f"the stage has room for {self.max_model_len}"
            )
        if start.adapter and start.adapter not in self._adapters:
            raise ValueError(f"no adapter is loaded in slot {start.adapter}")
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
        row = self.row(request_id)
        info = self._info[row]
        if info.appended_step != step_id:
            info.appended_step, info.blocks_before = step_id, int(self.columns.num_blocks_R[row])
        self._put_blocks(row, info.blocks_before, block_ids)

    def trim(self, step_id: int, request_id: int, num_blocks: int) -> None:
        """Shorten a block table to its first `num_blocks`, before the same step extends it."""
        row = self.row(request_id)
        info, self.columns.num_blocks_R[row] = self._info[row], num_blocks
        self.block_tables_RB[row, num_blocks:] = 0
        info.appended_step, info.blocks_before = step_id, num_blocks

    def put_tokens(
        self, rows_S: NDArray[np.intp], positions_S: NDArray[np.int64], tokens_S: NDArray[np.int64]
    ) -> None:
        """Set one token per row, each at its own position."""
        self.tokens_RP[rows_S, positions_S] = tokens_S

    def apply(self, plan: StepPlan) -> None:
        """Apply the plan's changes, in its order (block transfers are the cache's part)."""
        for request_id in plan.released:
            self.release(request_id)
        for start in plan.started:
            self.start(start)
        for request_id, num_blocks in plan.trimmed:
            self.trim(plan.step_id, request_id, num_blocks)
        for request_id, block_ids in plan.new_blocks:
            self.append_blocks(plan.step_id, request_id, block_ids)
        for request_id, position, token in plan.fed:
            row = self._rows.get(request_id)
            if row is not None:  # a request that was released needs no token
                self.tokens_RP[row, position] = token
        if plan.drafts:
            ends = {request_id: start + length for request_id, start, length, _ in plan.slices}
            for request_id, drafts in plan.drafts:
                end = ends[request_id]
                self.tokens_RP[self.row(request_id), end - len(drafts) : end] = drafts

    def gather(self, slices: Sequence[SliceRow]) -> HostBatch:
        """The batch of one step. Raises KeyError for unknown requests, ValueError for slices
        outside their block table."""
        num_slices, rows, block_size = len(slices), self._rows, self._block_size
        ids, starts, lengths, samples = zip(*slices, strict=True)
        rows_S = np.array([rows[request_id] for request_id in ids], np.intp)
        starts_S, lengths_S = np.array(starts, np.int32), np.array(lengths, np.int32)
        ends_S = starts_S + lengths_S
        query_starts_S1 = np.zeros(num_slices + 1, dtype=np.int32)
        np.cumsum(lengths_S, out=query_starts_S1[1:])
        num_tokens = int(query_starts_S1[-1])
        max_kv_length = int(ends_S.max())
        blocks_S = self.columns.num_blocks_R[rows_S]
        over = np.flatnonzero(ends_S > blocks_S * block_size)
        if over.size:  # KV there would go to block 0, which is another's
            have = f"request {ids[over[0]]} has {blocks_S[over[0]]} blocks of {block_size} tokens"
            raise ValueError(f"{have}; its slice reaches position {ends_S[over[0]]}")
        if num_tokens == num_slices:
            rows_T, positions_T = rows_S, starts_S
        else:
            rows_T = np.repeat(rows_S, lengths_S)
            positions_T = np.arange(num_tokens, dtype=np.int32)
            positions_T += np.repeat(starts_S - query_starts_S1[:-1], lengths_S)
        blocks_T, within_T = np.divmod(positions_T, np.int32(block_size))
        longer = np.flatnonzero(lengths_S != 1)
        return HostBatch(
            rows_S=rows_S,
            starts_S=starts_S,
            lengths_S=lengths_S,
            ends_S=ends_S,
            samples_S=np.array(samples, np.bool_),
            query_starts_S1=query_starts_S1,
            positions_T=positions_T,
            tokens_T=self.tokens_RP[rows_T, positions_T],
            slot_mapping_T=self.block_tables_RB[rows_T, blocks_T] * np.int32(block_size) + within_T,
            num_tokens=num_tokens,
            num_decodes=int(longer[0]) if longer.size else num_slices,
            max_length=int(lengths_S.max()),
            max_kv_length=max_kv_length,
            adapters=self._runs(rows_S, lengths_S) if self._adapters else None,
        )

    def _runs(self, rows_S: NDArray[np.intp], lengths_S: NDArray[np.int32]) -> HostRuns | None:
        adapters_S = self.columns.adapter_R[rows_S]
        return runs_of(adapters_S - 1, lengths_S) if adapters_S.any() else None

    def to_device(self, host: HostBatch, device: torch.device) -> tuple[Batch, torch.Tensor]:
        """The geometry for the kernels and the input tokens, on the device."""
        num_columns = -(-host.max_kv_length // self._block_size)
        on_device = self._device_tables
        resident = on_device is not None and host.rows_S.max() < on_device.num_rows
        rows_or_tables_S = host.rows_S.astype(np.int32)
        if not resident:
            rows_or_tables_S = self.block_tables_RB[host.rows_S, :num_columns]
        arrays = (
            host.positions_T, host.query_starts_S1, host.starts_S, host.lengths_S,
            host.slot_mapping_T, host.tokens_T, rows_or_tables_S,
        )  # fmt: skip
        if device.type == "cpu":
            placed = [torch.from_numpy(np.ascontiguousarray(a)) for a in arrays]
        else:
            placed = upload_all(arrays, device)
        positions_T, query_starts_S1, starts_S, lengths_S = placed[:4]
        slot_mapping_T, tokens_T, block_tables_SB = placed[4:]
        if on_device is not None and resident:
            block_tables_SB = on_device.leveled(self.block_tables_RB, block_tables_SB, num_columns)
        geometry = Batch(
            positions_T=positions_T,
            query_starts_S1=query_starts_S1,
            starts_S=starts_S,
            lengths_S=lengths_S,
            block_tables_SB=block_tables_SB,
            slot_mapping_T=slot_mapping_T,
            num_decodes=host.num_decodes,
            max_length=host.max_length,
            max_kv_length=host.max_kv_length,
        )
        if host.adapters is not None:
            rows_N, run_starts, slots = host.adapters
            geometry.adapters = AdapterRuns(upload(rows_N, device), run_starts, slots)
        return geometry, tokens_T

    def _put_blocks(self, row: int, first: int, block_ids: tuple[int, ...]) -> None:
        request_id, end = self._info[row].request_id, first + len(block_ids)
        if end > self._width:
            raise ValueError(f"request {request_id} has {end} blocks; {self._width} fit a row")
        self.block_tables_RB[row, first:end] = block_ids
        if self._device_tables is not None:
            self._device_tables.note(row, first, end)
        self.columns.num_blocks_R[row] = end

    def _grow(self, num_rows: int) -> None:
        first = len(self.tokens_RP)
        for name in ("tokens_RP", "block_tables_RB"):
            old = getattr(self, name)
            new = np.zeros((first + num_rows, old.shape[1]), dtype=np.int32)  # no page is touched
            new[:first] = old
            setattr(self, name, new)
        self.columns = self.columns.grown(first + num_rows)
        self._free.extend(reversed(range(first, first + num_rows)))
