"""CUDA graphs of a stage's forward pass: one launch and one transfer per step.

A decode step of a 7B model runs some three hundred kernels in a few milliseconds; if they were
launched one by one, the host would be the bottleneck. So the pass is captured once per size with
all inputs in static buffers, and a step takes the smallest size that it fits, padded by slices
without tokens and by tokens without a KV slot, for which no kernel touches the cache.

Sizes follow the tiles of matrix products: a product computes whole tiles of 128 rows, so padding
a hybrid batch to a multiple of 128 tokens costs next to nothing: 257 tokens cost as much as 384,
padded or not.

On the last stage the graph goes on through final norm, language-model head and draw (`graph_draw`),
on every rank. Drawn tokens stay on the device for the next step (`run_ahead`) and are the one thing
copied back: that copy is the step's only synchronization.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from actors.stage.cuda.graph_draw import GraphDraw
from actors.stage.host_batch import HostBatch
from actors.stage.input_batch import InputBatch
from actors.stage.models.decoder import Decoder
from actors.stage.step_inputs import StepInputs

TILE = 128  # rows of a tile in the library's large matrix products

# Takes a function; returns what runs it again, and its result: tensors that every run overwrites.
Capture = Callable[[Callable[[], "StepOutput"]], tuple[Callable[[], None], "StepOutput"]]


@dataclass(slots=True)
class StepOutput:
    """The result of a pass, padded tokens and slices included.

    logits_SV and tokens_S: of each slice's last token, where the graph drew it: on the last stage.
    With several ranks the logits are this rank's shard, unscaled (`Decoder.sharded_logits`), and
    the tokens are the same on all. A token is -1 where it is not finite.
    """

    x_TH: torch.Tensor
    residual_TH: torch.Tensor
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
        draw: GraphDraw | None,
    ) -> None:
        """max_hybrid_tokens: largest captured hybrid batch, 0 for decodes only.
        draw: on the last stage."""
        self._decoder = decoder
        self._input_batch = input_batch
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
        self._num_rows = tables.num_rows
        # All graphs share these, as those of the draw.
        self._x_TH = decoder.empty_hidden(max_tokens)
        self._residual_TH = decoder.empty_hidden(max_tokens)
        self._graphs: dict[GraphSize, tuple[Callable[[], None], StepOutput]] = {}

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
            draws = self._draw.pack(rows)
        block_tables_RB = self._input_batch.block_tables_RB
        self._inputs.fill(host, block_tables_RB, draws, *size[:2], nowhere=self._num_rows)
        if self._hidden_TH is not None and hidden_TH is not None:
            self._hidden_TH[: host.num_tokens].copy_(hidden_TH, non_blocking=True)
        replay, output = self._graphs[size]
        replay()
        return output

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
                tokens_T = self._inputs.tokens_T[:num_tokens]
                if self._draw is not None:
                    tokens_T = self._draw.known(tokens_T)
                x_TH = self._decoder.embed(tokens_T, batch.positions_T)
            else:
                x_TH = self._hidden_TH[:num_tokens].clone()
            # A batch object of its own for each run: what a backend derives from it and keeps
            # (flash-attn's lengths) must be derived inside the graph.
            x_TH, residual_TH = self._decoder.layers(x_TH, replace(batch))
            output = StepOutput(
                self._x_TH[:num_tokens].copy_(x_TH),
                self._residual_TH[:num_tokens].copy_(residual_TH),
            )
            if self._draw is not None:
                self._finish(output, num_slices, self._draw)
            return output

        return forward

    def _finish(self, output: StepOutput, num_slices: int, draw: GraphDraw) -> None:
        rows_S = self._inputs.last_rows_S[:num_slices]
        normed_SH = self._decoder.final_norm(
            output.x_TH.index_select(0, rows_S), output.residual_TH.index_select(0, rows_S)
        )
        output.logits_SV, output.tokens_S = draw.draw(
            normed_SH, self._inputs.draws_S3[:num_slices], self._inputs.batch_rows_S[:num_slices]
        )


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
