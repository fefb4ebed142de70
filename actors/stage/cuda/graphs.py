"""CUDA graphs of a stage's forward pass: one launch and one transfer per step.

A decode step of a 7B model runs some three hundred kernels in a few milliseconds; if they were
launched one by one, the host would be the bottleneck. So the pass is captured once per size with
all inputs in static buffers, and a step takes the smallest size that it fits, padded by slices
without tokens and by tokens without a KV slot, for which no kernel touches the cache.

Sizes follow the tiles of matrix products: a product computes whole tiles of 128 rows, so padding
a hybrid batch to a multiple of 128 tokens costs next to nothing: 257 tokens cost as much as 384,
padded or not.

A slice with drafts is a short chunk that draws in several rows, so such steps take the hybrid
sizes. Steps with adapters have a second set of graphs, where there are slots: the launches of
adapters would cost the others some microseconds per layer.

On the last stage the graph goes on through final norm, language-model head and draw (`graph_draw`),
on every rank. Drawn tokens stay on the device for the next step (`run_ahead`) and are the one thing
copied back: that copy is the step's only synchronization.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from actors.scheduling.plan import logit_rows
from actors.stage.cuda.graph_draw import GraphDraw
from actors.stage.drafts import Draws
from actors.stage.host_batch import HostBatch
from actors.stage.input_batch import InputBatch
from actors.stage.models.decoder import Decoder
from actors.stage.step_inputs import AdapterTiling, GraphSize, StepInputs

TILE = 128  # rows of a tile in the library's large matrix products

# Takes a function; returns what runs it again, and its result: tensors that every run overwrites.
Capture = Callable[[Callable[[], "StepOutput"]], tuple[Callable[[], None], "StepOutput"]]


@dataclass(slots=True)
class StepOutput:
    """The result of a pass, padded tokens and draws included.

    logits_SV and tokens_S: of each draw (`Draws`), where the graph drew: on the last stage.
    With several ranks the logits are this rank's shard, unscaled (`Decoder.sharded_logits`), and
    the tokens are the same on all. A token is -1 where it is not finite.
    """

    x_TH: torch.Tensor
    residual_TH: torch.Tensor
    logits_SV: torch.Tensor | None = None
    tokens_S: torch.Tensor | None = None


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
        tiling: AdapterTiling,
        has_states: bool = False,
    ) -> None:
        """max_hybrid_tokens: largest captured hybrid batch, 0 for decodes only.
        draw: on the last stage. has_states: as of `StepInputs`."""
        self._decoder = decoder
        self._input_batch = input_batch
        self._draw = draw
        self._max_requests = max_requests
        self._decode_sizes = decode_sizes(max_requests)
        self._hybrid_sizes = hybrid_sizes(max_hybrid_tokens)
        self._has_slots = tiling.num_slots > 0
        self._max_draws = logit_rows(max_requests)
        max_tokens = max([max_requests, *self._hybrid_sizes])
        tables = input_batch.tables_on(decoder.device)
        largest = GraphSize(max_tokens, max_requests, self._max_draws, decodes=False)
        self._inputs = StepInputs(largest, tiling, tables, decoder.device, has_states)
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
        sizes = [
            size
            for adapted in (False, True)[: 1 + self._has_slots]
            for size in (
                *(GraphSize(n, n, n, True, adapted) for n in self._decode_sizes),
                *(self._hybrid(n, adapted) for n in self._hybrid_sizes),
            )
        ]
        self._inputs.clear()
        for size in sorted(sizes, reverse=True):
            self._graphs[size] = capture(self._forward_of(size))

    def run(
        self, host: HostBatch, hidden_TH: torch.Tensor | None, draws: Draws | None
    ) -> StepOutput | None:
        """The step's pass by its graph, or None where no captured size holds it.

        draws: on the last stage. The next step overwrites the result.
        """
        size = self._size_of(host, 0 if draws is None else len(draws.slices_N))
        if size is None:
            return None
        packed_S3 = None
        if self._draw is not None and draws is not None:
            rows_S = host.rows_S[draws.slices_N]
            packed_S3 = self._draw.pack(self._input_batch.columns.draws(rows_S, draws.positions_N))
        block_tables_RB = self._input_batch.block_tables_RB
        self._inputs.fill(size, host, block_tables_RB, draws, packed_S3, nowhere=self._num_rows)
        if self._hidden_TH is not None and hidden_TH is not None:
            self._hidden_TH[: host.num_tokens].copy_(hidden_TH, non_blocking=True)
        replay, output = self._graphs[size]
        replay()
        self._inputs.settle()
        return output

    def _size_of(self, host: HostBatch, num_draws: int) -> GraphSize | None:
        num_slices = len(host.rows_S)
        if num_slices > self._max_requests or host.rows_S.max() >= self._num_rows:
            return None
        adapted = host.adapters is not None
        if host.max_length == 1:
            n = _at_least(self._decode_sizes, num_slices)
            return None if n is None else GraphSize(n, n, n, True, adapted)
        num_tokens = _at_least(self._hybrid_sizes, host.num_tokens)
        if num_tokens is None or num_draws > self._max_draws:
            return None
        return self._hybrid(num_tokens, adapted)

    def _hybrid(self, num_tokens: int, adapted: bool) -> GraphSize:
        num_slices = min(num_tokens, self._max_requests)
        return GraphSize(num_tokens, num_slices, min(num_tokens, self._max_draws), False, adapted)

    def _forward_of(self, size: GraphSize) -> Callable[[], StepOutput]:
        num_tokens, num_slices, num_draws = size[:3]
        batch = self._inputs.batch(size, self._input_batch.max_model_len)

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
                self._finish(output, num_draws, self._draw)
            return output

        return forward

    def _finish(self, output: StepOutput, num_draws: int, draw: GraphDraw) -> None:
        rows_S = self._inputs.draw_rows_S[:num_draws]
        normed_SH = self._decoder.final_norm(
            output.x_TH.index_select(0, rows_S), output.residual_TH.index_select(0, rows_S)
        )
        output.logits_SV, output.tokens_S = draw.draw(
            normed_SH, self._inputs.draws_S3[:num_draws], self._inputs.batch_rows_S[:num_draws]
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
