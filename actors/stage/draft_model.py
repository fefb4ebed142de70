"""A small model that guesses the tokens after those which a step has drawn.

It runs in rank 0 of the last stage, unsharded, which knows all tokens and draws. Its KV stands in
arrays of its own under the block tables of the served model, so a block that is shared, copied or
found in the prefix cache serves both. It computes a token only when a request asks for drafts; how
much of each block it has computed is noted, and whatever the served model writes anew, unless it
computes known tokens again, counts as not computed. Where its layers keep states, it goes on from
the state of a request's known tokens, beside which it guesses. Wrong or missing KV of it would cost
acceptance, never text.

Guesses are drawn as the served model draws: with the request's own parameters and the noise of
(seed, position), so that two distributions that are close mostly agree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from actors.scheduling.plan import StepPlan
from actors.stage.drafts import DraftOrder
from actors.stage.head import Sampler
from actors.stage.host_batch import HostBatch, HostStates
from actors.stage.input_batch import InputBatch
from actors.stage.kv import KVCache
from actors.stage.loaded_model import LoadedModel, load_model
from actors.stage.models.config import ModelError
from actors.stage.spec import StageSpec
from actors.stage.states import DraftStates, RecurrentStates, state_rows
from kernels.interface import Batch
from kernels.registry import BackendError

_MOST_TOKENS = 256  # of prompts and outputs that one step makes up for, so that it stays short


@dataclass(slots=True)
class _DraftRow:
    """A request that asks for `count` drafts after the token at `last`. start: the first position
    without KV of the draft model. number: among those of the step."""

    number: int
    request_id: int
    row: int
    last: int
    count: int
    start: int

    @property
    def num_missing(self) -> int:
        return self.last + 1 - self.start


class DraftModel:
    """Loaded once constructed: `allocate`, then per step `note` before it and `offer` after it."""

    def __init__(
        self, spec: StageSpec, served: LoadedModel, input_batch: InputBatch, sampler: Sampler,
        progress: Callable[[float], None],
    ) -> None:  # fmt: skip
        """spec: of the served model's rank. Raises ModelError naming the setting."""
        if spec.device != "cpu":
            raise ModelError("speculation.model: draft models run on the CPU only")
        try:
            self._model = model = load_model(spec.of_draft_model(), progress)
        except (ModelError, BackendError) as bad:
            raise ModelError(f"speculation.model: {bad}") from bad
        if model.config.vocab_size != served.config.vocab_size:
            raise ModelError(
                f"speculation.model: a vocabulary of {model.config.vocab_size} tokens in "
                f"{spec.draft_model_path}, of {served.config.vocab_size} in {spec.model_path}"
            )
        self._input_batch = input_batch
        self._sampler = sampler
        self._block_size = spec.block_size
        self._most_tokens = min(_MOST_TOKENS, spec.max_step_tokens)
        # Drafts may reach past a request's blocks: their KV is computed again when they stand.
        self._num_spare = -(-(spec.max_drafts + 1) // spec.block_size)  # blocks of one request
        self._most_requests, self._most_drafts = spec.max_requests, spec.max_drafts
        # What a step asked for and was offered: one that is repeated is offered the same.
        self._last: tuple[int, list[DraftOrder], dict[int, list[int]]] = (-1, [], {})
        self._cache: KVCache | None = None
        self._states: RecurrentStates | None = None  # if layers keep them
        self._places = DraftStates(spec.max_requests)
        self._num_blocks = 0
        self._num_filled_B: NDArray[np.int32] = np.zeros(0, np.int32)  # leading tokens of a block

    @property
    def kv_block_bytes(self) -> int:
        return self._model.kv_block_bytes

    @property
    def spare_bytes(self) -> int:
        """Memory of the blocks that it has beside the served model's."""
        return self._num_spare * self._most_requests * self.kv_block_bytes

    @property
    def state_bytes(self) -> int:
        """As of `StageInfo`."""
        return self._model.state_bytes

    def allocate(self, num_blocks: int, num_requests: int) -> None:
        """Make the KV cache, of as many blocks as the served model's and those for drafts, and
        states of so many requests."""
        self._num_blocks = num_blocks
        self._num_filled_B = np.zeros(num_blocks, np.int32)
        num_all = num_blocks + self._num_spare * self._most_requests
        self._cache, self._states = self._model.make_cache(num_all, num_requests=num_requests)
        self._places = DraftStates(num_requests if self.state_bytes else self._most_requests)

    def forget(self, block: int) -> None:
        """Its content has been replaced."""
        self._num_filled_B[block] = 0

    def note(self, plan: StepPlan, host: HostBatch) -> None:
        """Follow what a step does to blocks; called once per step, before its drafts."""
        filled_B = self._num_filled_B
        for _, block in plan.swap_in:
            filled_B[block] = 0
        if plan.copies:
            assert self._cache is not None
            self._cache.copy(plan.copies)
            for source, destination in plan.copies:
                filled_B[destination] = filled_B[source]
        reached_R = self._places.position_R
        for start in plan.started:
            reached_R[self._input_batch.row(start.request_id)] = 0
        # Known tokens that are computed again are the ones that there is KV of.
        is_new_T = host.positions_T >= np.repeat(reached_R[host.rows_S], host.lengths_S)
        slots_T = host.slot_mapping_T[is_new_T]
        blocks_T, within_T = np.divmod(slots_T, np.int32(self._block_size))
        np.minimum.at(filled_B, blocks_T, within_T)

    def offer(
        self, step_id: int, asked: Sequence[DraftOrder]
    ) -> tuple[dict[int, list[int]], float]:
        """Drafts by request, and the mean seconds of a pass over one token of each; 0.0: none."""
        if self._last[:2] == (step_id, [*asked]):
            return self._last[2], 0.0
        asking = self._asking(asked)
        drafts, passes_s = self._draft(asking) if asking else ({}, [])
        self._last = (step_id, [*asked], drafts)
        return drafts, sum(passes_s) / max(1, len(passes_s))

    def _asking(self, asked: Sequence[DraftOrder]) -> list[_DraftRow]:
        """The requests that ask, the fewest tokens to make up for first."""
        found: list[_DraftRow] = []
        for request_id, last, wanted in asked[: self._most_requests]:
            count = min(wanted, self._most_drafts, self._model.max_model_len - last - 1)
            if count > 0:
                row = self._input_batch.row(request_id)
                first = self._first_missing(row, last)
                found.append(_DraftRow(len(found), request_id, row, last, count, first))
        return sorted(found, key=lambda one: one.num_missing)

    def _first_missing(self, row: int, last: int) -> int:
        """The first position of a request, whose newest token is at `last`, to be computed."""
        filled = min(self._num_filled(row), last)
        if self._states is None:
            return filled
        kept = int(self._places.position_R[row])  # states continue nowhere else
        return kept if kept <= filled else 0

    def _num_filled(self, row: int) -> int:
        """Leading tokens of a request whose KV is there."""
        blocks = self._blocks(row)
        filled = self._num_filled_B[blocks]
        partial = np.flatnonzero(filled < self._block_size)
        if not partial.size:
            return len(blocks) * self._block_size
        return int(partial[0]) * self._block_size + int(filled[partial[0]])

    def _blocks(self, row: int) -> NDArray[np.int32]:
        batch = self._input_batch
        return batch.block_tables_RB[row, : batch.columns.num_blocks_R[row]]

    @torch.inference_mode()
    def _draft(self, asking: list[_DraftRow]) -> tuple[dict[int, list[int]], list[float]]:
        """Drafts by request, and the seconds of each pass over few tokens. The first pass makes up
        for what is missing, each further one adds a draft."""
        begin_s = time.monotonic()
        lengths = self._lengths(asking)
        asking = asking[: len(lengths)]
        starts_S = np.array([one.start for one in asking], np.int32)
        lengths_S = np.array(lengths, np.int32)
        rows_S = np.array([one.row for one in asking], np.intp)
        lasts_S = np.array([one.last for one in asking], np.int32)
        ends_S = np.minimum(starts_S + lengths_S, lasts_S)
        states = self._places.begin(rows_S, starts_S, ends_S)
        x_TH, residual_TH = self._forward(asking, starts_S, lengths_S, states)
        self._places.keep(rows_S, ends_S)
        for one, length in zip(asking, lengths, strict=True):
            self._note_filled(one.row, min(one.start + length, one.last))
        # Those that wait for more of their tokens come last.
        going = [one for one, n in zip(asking, lengths, strict=True) if n == one.num_missing]
        rows = (np.cumsum(lengths_S)[: len(going)] - 1).tolist()
        drafts: dict[int, list[int]] = {one.request_id: [] for one in going}
        is_short, passes_s, number = max(lengths) <= self._most_drafts + 1, list[float](), 0
        while going:
            tokens = self._draw(going, number, x_TH, residual_TH, rows)
            now_s = time.monotonic()
            if is_short or number:
                passes_s.append(now_s - begin_s)
            begin_s, number = now_s, number + 1
            for one, token in zip(going, tokens, strict=True):
                if token >= 0:
                    drafts[one.request_id].append(token)
            going = [one for one in going if len(drafts[one.request_id]) == number < one.count]
            if going:
                starts_S = np.array([one.last + number for one in going], np.int32)
                states = self._places.guess(np.array([one.row for one in going], np.intp))
                ones_S = np.ones(len(going), np.int32)
                x_TH, residual_TH = self._forward(going, starts_S, ones_S, states)
                rows = list(range(len(going)))
        return drafts, passes_s

    def _lengths(self, asking: list[_DraftRow]) -> list[int]:
        """How many tokens of each request, from the first, the first pass makes up for."""
        lengths, left = list[int](), self._most_tokens
        for one in asking:
            if left:
                lengths.append(min(one.num_missing, left))
                left -= lengths[-1]
        return lengths

    def _forward(
        self, asking: list[_DraftRow], starts_S: NDArray[np.int32], lengths_S: NDArray[np.int32],
        states: HostStates,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """(x, residual) of these slices."""
        size, decoder = np.int32(self._block_size), self._model.decoder
        query_starts_S1 = np.zeros(len(asking) + 1, np.int32)
        np.cumsum(lengths_S, out=query_starts_S1[1:])
        slices_T = np.repeat(np.arange(len(asking)), lengths_S)
        positions_T = np.arange(query_starts_S1[-1], dtype=np.int32)
        positions_T += (starts_S - query_starts_S1[:-1])[slices_T]
        tables_SB = self._tables(asking, int((starts_S + lengths_S).max()))
        blocks_T, within_T = np.divmod(positions_T, size)
        rows = np.array([one.row for one in asking], np.intp)
        longer = np.flatnonzero(lengths_S != 1)
        batch = Batch(
            positions_T=torch.from_numpy(positions_T),
            query_starts_S1=torch.from_numpy(query_starts_S1),
            starts_S=torch.from_numpy(starts_S),
            lengths_S=torch.from_numpy(lengths_S),
            block_tables_SB=torch.from_numpy(tables_SB),
            slot_mapping_T=torch.from_numpy(tables_SB[slices_T, blocks_T] * size + within_T),
            num_decodes=int(longer[0]) if longer.size else len(asking),
            max_length=int(lengths_S.max()),
            max_kv_length=int((starts_S + lengths_S).max()),
        )
        if self._states is not None:
            batch.states = state_rows(states, batch)
        tokens_T = torch.from_numpy(self._input_batch.tokens_RP[rows[slices_T], positions_T])
        return decoder.layers(decoder.embed(tokens_T, batch.positions_T), batch)

    def _tables(self, asking: list[_DraftRow], num_tokens: int) -> NDArray[np.int32]:
        """Block tables for this many tokens, spare blocks after those of each request's known
        tokens."""
        width = -(-num_tokens // self._block_size)
        tables_SB = np.zeros((len(asking), width), np.int32)
        for s, one in enumerate(asking):
            # Not the block behind the known tokens: it may have been taken back, and be another's.
            num_own = min(width, -(-one.last // self._block_size))
            blocks = self._blocks(one.row)[:num_own]
            tables_SB[s, : len(blocks)] = blocks
            first = self._num_blocks + one.number * self._num_spare
            spare = np.arange(first, first + self._num_spare, dtype=np.int32)[: width - len(blocks)]
            tables_SB[s, len(blocks) : len(blocks) + len(spare)] = spare
        return tables_SB

    def _draw(
        self,
        asking: list[_DraftRow],
        number: int,
        x_TH: torch.Tensor,
        residual_TH: torch.Tensor,
        at: list[int],
    ) -> list[int]:
        """Draft `number` (from 0) of each request from its row of the output, -1 where that is not
        finite."""
        decoder = self._model.decoder
        logits_RV = decoder.logits(decoder.final_norm_of(x_TH, residual_TH, at))
        assert logits_RV is not None
        rows = np.array([one.row for one in asking], np.intp)
        positions = np.array([one.last + 1 + number for one in asking], np.int64)
        tokens = self._sampler.tokens(rows, positions, logits_RV)
        self._input_batch.put_tokens(rows, positions, tokens.clip(min=0))
        found: list[int] = tokens.tolist()
        return found

    def _note_filled(self, row: int, num_tokens: int) -> None:
        """The KV of this many leading tokens is there."""
        filled_B, blocks = self._num_filled_B, self._blocks(row)
        full, rest = divmod(num_tokens, self._block_size)
        filled_B[blocks[:full]] = self._block_size
        if full < len(blocks):
            filled_B[blocks[full]] = max(int(filled_B[blocks[full]]), rest)
