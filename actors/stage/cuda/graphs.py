"""CUDA graphs of a stage's forward pass: one launch and one transfer per step.

A decode step of a 7B model runs some three hundred kernels in a few milliseconds; if they were
launched one by one, the host would be the bottleneck. So the pass is captured once per size with
all inputs in static buffers, and a step takes the smallest size that it fits, padded by slices
without tokens and by tokens without a KV slot, for which no kernel touches the cache.

Sizes follow the tiles of matrix products: a product computes whole tiles of 128 rows, so padding
a hybrid batch to a multiple of 128 tokens costs next to nothing: 257 tokens cost as much as 384,
padded or not.

On the last stage the graph goes on through final norm, language-model head and draw. Drawn tokens
stay on the device for the next step (`run_ahead`) and are the one thing copied back: that copy is
the step's only synchronization.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from actors.stage.host_batch import HostBatch
from actors.stage.input_batch import InputBatch
from actors.stage.landing import Landing, TokenLanding
from actors.stage.models.decoder import Decoder
from actors.stage.step_inputs import StepInputs
from kernels.graph_support import GraphSupport
from kernels.sampling import SamplingRows
from kernels.upload import upload

TILE = 128  # rows of a tile in the library's large matrix products

# Takes a function; returns what runs it again, and its result: tensors that every run overwrites.
Capture = Callable[[Callable[[], "StepOutput"]], tuple[Callable[[], None], "StepOutput"]]


@dataclass(slots=True)
class StepOutput:
    """The result of a pass, padded tokens and slices included.

    headed: the pass went on through norm and head, on every rank: the ranks' parts of the logits
    have been gathered, and asking for them again would be a gather that rank 0 does not join.
    logits_SV and tokens_S: of each slice's last token, on rank 0 of the last stage.
    """

    x_TH: torch.Tensor
    residual_TH: torch.Tensor
    headed: bool = False
    logits_SV: torch.Tensor | None = None
    tokens_S: torch.Tensor | None = None


class GraphSize(NamedTuple):
    """decodes: every slice holds at most one token, so num_tokens == num_slices."""

    num_tokens: int
    num_slices: int
    decodes: bool


def decode_sizes(max_requests: int) -> list[int]:
    """Fine where steps are short and padding is expensive, coarser above."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_requests, 32)]
    return [size for size in steps if size < max_requests] + [max_requests]


def hybrid_sizes(max_tokens: int) -> list[int]:
    """Whole tiles; below one tile, halves of it."""
    small = [size for size in (16, 32, 64) if size <= max_tokens]
    return small + list(range(TILE, max_tokens + 1, TILE))


class StepGraphs:
    """All captured sizes of one stage. `capture` comes after the cache, before the first step."""

    def __init__(
        self,
        decoder: Decoder,
        input_batch: InputBatch,
        max_requests: int,
        max_hybrid_tokens: int,
        is_first: bool,
        is_last: bool,
        draw: GraphSupport | None,
    ) -> None:
        """max_hybrid_tokens: largest captured hybrid batch, 0 for decodes only.
        draw: how to draw in a graph, on rank 0 of the last stage."""
        self._decoder = decoder
        self._input_batch = input_batch
        self._is_last = is_last
        self._draw = draw
        self._max_requests = max_requests
        self._decode_sizes = decode_sizes(max_requests)
        self._hybrid_sizes = hybrid_sizes(max_hybrid_tokens)
        max_tokens = max([max_requests, *self._hybrid_sizes])
        tables = input_batch.tables_on(decoder.device)
        self._inputs = StepInputs(max_tokens, max_requests, tables, decoder.device)
        self._hidden_TH: torch.Tensor | None = None
        if not is_first:
            self._hidden_TH = decoder.empty_hidden(max_tokens)
        # The token last drawn for each row of the persistent batch, and a place for those of none.
        self._num_rows = tables.num_rows
        self._drawn_R = torch.zeros(self._num_rows + 1, dtype=torch.int32, device=decoder.device)
        self._landing = TokenLanding(max_requests, decoder.device)
        self._results = self._make_results(max_tokens)
        self._graphs: dict[GraphSize, tuple[Callable[[], None], StepOutput]] = {}

    def _make_results(self, max_tokens: int) -> StepOutput:
        """The result buffers that all graphs share. Separate buffers would hold memory for each
        size permanently, although only the latest step's result is read."""
        results = StepOutput(
            self._decoder.empty_hidden(max_tokens), self._decoder.empty_hidden(max_tokens)
        )
        if self._draw is not None:
            shape, device = (self._max_requests, self._decoder.vocab_size), self._decoder.device
            results.logits_SV = torch.empty(shape, dtype=torch.float32, device=device)
            results.tokens_S = torch.empty(shape[0], dtype=torch.int32, device=device)
        return results

    def capture(self, capture: Capture) -> None:
        """Capture every size, the largest first: later ones reuse its memory.

        Nothing is written to the cache: until the first step all inputs are padding.
        """
        sizes = [GraphSize(size, size, decodes=True) for size in self._decode_sizes]
        sizes += [self._hybrid(size) for size in self._hybrid_sizes]
        self._inputs.clear()
        for size in sorted(sizes, reverse=True):
            self._graphs[size] = capture(self._forward_of(size))

    def run(self, host: HostBatch, hidden_TH: torch.Tensor | None) -> StepOutput | None:
        """The step's pass by its graph, or None where no captured size holds it.

        The next step overwrites the result.
        """
        size = self._size_of(host) if host.adapters is None else None
        if size is None:
            return None
        draws = None
        if self._draw is not None:
            rows = self._input_batch.columns.draws(host.rows_S, host.ends_S.astype(np.int64))
            draws = self._draw.pack_rows(rows)
        block_tables_RB = self._input_batch.block_tables_RB
        self._inputs.fill(host, block_tables_RB, draws, *size[:2], nowhere=self._num_rows)
        if self._hidden_TH is not None and hidden_TH is not None:
            self._hidden_TH[: host.num_tokens].copy_(hidden_TH, non_blocking=True)
        replay, output = self._graphs[size]
        replay()
        return output

    def redraw(
        self,
        output: StepOutput,
        slices: NDArray[np.intp],
        rows_S: NDArray[np.intp],
        adjust: Callable[[torch.Tensor], None],
        draws: SamplingRows,
    ) -> None:
        """Queue another draw for some slices, from a copy of their logits that `adjust` changes."""
        logits_SV, tokens_S = _drawn(output)
        assert self._draw is not None
        device = self._decoder.device
        slices_R = upload(slices.astype(np.int64), device)
        logits_RV = logits_SV.index_select(0, slices_R)
        adjust(logits_RV)
        drawn_R = self._draw.sample(logits_RV, upload(self._draw.pack_rows(draws), device))
        self._drawn_R.index_copy_(0, upload(rows_S.astype(np.int64), device), drawn_R)
        tokens_S.index_copy_(0, slices_R, _or_minus_one(drawn_R, logits_RV))

    def gather_logprobs(
        self, output: StepOutput, slices: NDArray[np.intp], num_top: int
    ) -> tuple[torch.Tensor, ...]:
        """Queue log-probabilities of the tokens drawn for some slices; they arrive on the host
        before tokens that are fetched after this."""
        logits_SV, tokens_S = _drawn(output)
        assert self._draw is not None
        slices_R = upload(slices.astype(np.int64), self._decoder.device)
        logits_RV = logits_SV.index_select(0, slices_R)
        tokens_R = tokens_S.index_select(0, slices_R).long().clamp(min=0)
        logprobs = self._draw.gather_logprobs(logits_RV, tokens_R, num_top)
        return tuple(x.to("cpu", non_blocking=True) for x in logprobs)

    def fetch_tokens(self, output: StepOutput, count: int) -> Landing:
        """Start copying the first `count` tokens back."""
        return self._landing.fetch(_drawn(output)[1][:count])

    def _size_of(self, host: HostBatch) -> GraphSize | None:
        num_slices = len(host.rows_S)
        if num_slices > self._max_requests or host.rows_S.max() >= self._num_rows:
            return None
        if host.max_length == 1:
            decodes = _at_least(self._decode_sizes, num_slices)
            return None if decodes is None else GraphSize(decodes, decodes, decodes=True)
        num_tokens = _at_least(self._hybrid_sizes, host.num_tokens)
        return None if num_tokens is None else self._hybrid(num_tokens)

    def _hybrid(self, num_tokens: int) -> GraphSize:
        return GraphSize(num_tokens, min(num_tokens, self._max_requests), decodes=False)

    def _forward_of(self, size: GraphSize) -> Callable[[], StepOutput]:
        num_tokens, num_slices, decodes = size
        max_model_len = self._input_batch.max_model_len
        batch = self._inputs.batch(num_tokens, num_slices, decodes, max_model_len)

        def forward() -> StepOutput:
            self._inputs.place_tables(num_slices)
            if self._hidden_TH is None:
                tokens_T = self._known(self._inputs.tokens_T[:num_tokens])
                x_TH = self._decoder.embed(tokens_T, batch.positions_T)
            else:
                x_TH = self._hidden_TH[:num_tokens].clone()
            # A batch object of its own for each run: what a backend derives from it and keeps
            # (flash-attn's lengths) must be derived inside the graph.
            x_TH, residual_TH = self._decoder.layers(x_TH, replace(batch))
            output = StepOutput(
                self._results.x_TH[:num_tokens].copy_(x_TH),
                self._results.residual_TH[:num_tokens].copy_(residual_TH),
            )
            if self._is_last:
                self._finish(output, num_slices)
            return output

        return forward

    def _known(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """Replace the placeholders, -1 - row, by the token last drawn for that row."""
        drawn_T = self._drawn_R.index_select(0, (-1 - tokens_T).clamp_(min=0))
        return torch.where(tokens_T < 0, drawn_T, tokens_T)

    def _finish(self, output: StepOutput, num_slices: int) -> None:
        rows_S = self._inputs.last_rows_S[:num_slices]
        normed_SH = self._decoder.final_norm(
            output.x_TH.index_select(0, rows_S), output.residual_TH.index_select(0, rows_S)
        )
        logits_SV, tokens_S = self._results.logits_SV, self._results.tokens_S
        place_SV = None if logits_SV is None else logits_SV[:num_slices]
        output.logits_SV = self._decoder.logits(normed_SH, place_SV)
        output.headed = True
        if self._draw is not None and output.logits_SV is not None and tokens_S is not None:
            packed_S3 = self._inputs.draws_S3[:num_slices]
            drawn_S = self._draw.sample(output.logits_SV, packed_S3)
            rows_S = self._inputs.batch_rows_S[:num_slices]
            self._drawn_R.index_copy_(0, rows_S.long(), drawn_S)
            drawn_S = _or_minus_one(drawn_S, output.logits_SV)
            output.tokens_S = tokens_S[:num_slices].copy_(drawn_S)


def _drawn(output: StepOutput) -> tuple[torch.Tensor, torch.Tensor]:
    if output.logits_SV is None or output.tokens_S is None:
        raise ValueError("this stage draws no tokens")
    return output.logits_SV, output.tokens_S


def _or_minus_one(drawn_S: torch.Tensor, logits_SV: torch.Tensor) -> torch.Tensor:
    """The tokens; -1, which fails the step, where a token's logit is not finite."""
    at_S1 = drawn_S.long().clamp(0, logits_SV.shape[1] - 1)[:, None]
    is_finite_S = torch.isfinite(logits_SV.gather(1, at_S1))[:, 0]
    return drawn_S.masked_fill(~is_finite_S, -1)


def _at_least(sizes: Sequence[int], wanted: int) -> int | None:
    index = bisect.bisect_left(sizes, wanted)
    return sizes[index] if index < len(sizes) else None


def capture_on_gpu() -> Capture:
    """Captures with torch.cuda.CUDAGraph; graphs of one call share a memory pool."""
    pool = torch.cuda.graph_pool_handle()
    # One for all: libraries keep a workspace for every stream that they have been called on.
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def capture(work: Callable[[], StepOutput]) -> tuple[Callable[[], None], StepOutput]:
        # Once outside: kernels compile and libraries initialize, which capture forbids.
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads (NCCL's watchdog, Ray) may call the driver meanwhile.
        with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
            output = work()
        return graph.replay, output

    return capture
