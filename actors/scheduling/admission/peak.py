"""Admission by memory: the predicted peak of KV use, as running requests grow and finish.

A request starts only if the peak stays within the cache (the method of LightLLM's scheduler).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.events import MayReturn, Refuse
from actors.scheduling.interfaces import EngineView, RequestView, StepTimePredictor
from actors.scheduling.registry import within
from actors.scheduling.request import Request

WALKED, LUMP = 64, 0.25  # requests of a queue taken singly; most of those that fit taken as one


def peak_kv_tokens(
    requests: Iterable[tuple[int, int]], num_saved: int = 0, unused: float = 0.0
) -> float:
    """Most KV tokens ever held by requests (tokens now, tokens still to come) that run together.

    All grow by one token per step, and a finished one frees its tokens. Peaks occur only when a
    request finishes, so it suffices to sort by remaining tokens and go through from the longest.
    num_saved: tokens that need no memory, as requests share them. Which ones do is not known, so
    that those that have ended by then are taken to have saved as much as they held.

    >>> peak_kv_tokens([(10, 5), (4, 2)])
    18
    >>> peak_kv_tokens([(10, 5), (10, 2)], num_saved=8)
    16
    """
    ordered = sorted(requests, key=lambda r: -r[1])
    peak, held, ended = 0.0, 0, sum([now for now, _ in ordered])
    for count, (now, left) in enumerate(ordered, start=1):
        held, ended = held + now, ended - now
        peak = max(peak, held + count * (left + unused) - max(0, num_saved - ended))
    return peak


class Places:
    """When requests that start in order, each as soon as the peak fits, find memory and a slot.

    Times are steps from now; at each, all that run grow by one token. A request that ends frees
    memory from then on only: one that ends before the peak leaves no more room at the peak.
    """

    def __init__(
        self, running: Iterable[tuple[float, float]], capacity: float, max_requests: int
    ) -> None:
        """running: (tokens now, tokens still to come) of each."""
        self.capacity, self._most = capacity, max_requests
        # Of those placed, sorted: their ends, and the tokens and the requests there are until then
        self._ends: list[float] = []
        self._held: list[float] = []
        self._num: list[int] = []
        held = 0.0
        for count, (now, left) in enumerate(sorted(running, key=lambda r: -r[1]), start=1):
            held += now
            self._ends.append(left)
            self._held.append(held + count * left)
            self._num.append(count)
        for column in (self._ends, self._held, self._num):
            column.reverse()
        # The last start, and tokens that start then. While what runs may lack memory, none starts.
        over = [end for end, held in zip(self._ends, self._held, strict=True) if held > capacity]
        self._begun, self._together = max(over, default=0.0), 0.0

    def when(self, tokens: float, output: float, count: int = 1) -> tuple[float, float]:
        """When `count` such requests start behind those added, and the tokens that start then."""
        start = self._begun
        while (later := self._not_before(start, tokens, output, count)) > start:
            start = later
        return start, count * tokens + (self._together if start == self._begun else 0.0)

    def add(self, tokens: float, output: float, count: int = 1) -> None:
        start, self._together = self.when(tokens, output, count)
        self._begun, end = start, start + output
        ended = bisect_right(self._ends, start)
        del self._ends[:ended], self._held[:ended], self._num[:ended]
        at = bisect_left(self._ends, end)
        held, num = self._others(at, end)
        for i in range(at):
            self._held[i] += count * (tokens + self._ends[i] - start)
            self._num[i] += count
        self._ends.insert(at, end)
        self._held.insert(at, held + count * (tokens + output))
        self._num.insert(at, num + count)

    def _not_before(self, start: float, tokens: float, output: float, count: int) -> float:
        """A time before which they cannot start; `start` itself if they can."""
        ends, end = self._ends, start + output
        first, at = bisect_right(ends, start), bisect_left(ends, end)
        if first < len(ends) and self._num[first] + count > self._most:
            return ends[first]
        latest, room = start, self.capacity - count * (tokens - start)
        for e, held in zip(ends[first:at], self._held[first:at], strict=True):
            if (lacking := held + count * e - room) > 0.0:
                latest = max(latest, min(e, start + lacking / count))
        held, _ = self._others(at, end)
        if at < len(ends) and held + count * (tokens + output) > self.capacity:
            latest = max(latest, ends[at] - output + 1.0)  # one more has ended by its end
        return latest

    def _others(self, at: int, end: float) -> tuple[float, int]:
        """Tokens and requests of those placed at `end`, before `_ends[at]`."""
        if at == len(self._ends):
            return 0.0, 0
        return self._held[at] - self._num[at] * (self._ends[at] - end), self._num[at]


@dataclass(slots=True)
class PredictedPeak:
    """A request starts only if the predicted KV peak fits; every request may queue.

    expected_share: part of max_tokens that outputs are expected to reach (1: the worst case).
    reserve: share of the cache that predictions may not use.
    """

    expected_share: float = 1.0
    reserve: float = 0.02

    def __post_init__(self) -> None:
        within(0, 1, expected_share=self.expected_share, reserve=self.reserve)

    @classmethod
    def build(
        cls, config: SchedulerConfig, cost: StepTimePredictor | None, **options: Any
    ) -> PredictedPeak:
        return cls(**options)

    def on_submit(self, request: Request, engine: EngineView) -> Refuse | None:
        return None

    def turned_away(self, refused: Sequence[MayReturn], now_s: float) -> None:
        """It refuses none."""

    def may_start(self, request: RequestView, engine: EngineView) -> bool:
        free = self.free_tokens(engine, request)
        if not -request.num_tokens <= free < 0.0:  # whatever it shares
            return free >= 0.0
        num_held = engine.num_held_of(request.request_id)
        return num_held > 0 and self.free_tokens(engine, request, num_held=num_held) >= 0.0

    def free_tokens(self, engine: EngineView, *starting: RequestView, num_held: int = 0) -> float:
        """KV tokens that stay free at the predicted peak of running and starting requests, of which
        the starting ones share num_held with running ones."""
        held = [self._growth(view) for view in (*_running(engine), *starting)]
        num_saved = _num_saved(engine) + num_held
        # Requests occupy whole blocks, of which half a block is unused on average.
        return self._capacity(engine) - peak_kv_tokens(held, num_saved, engine.block_size / 2)

    def places(self, engine: EngineView, max_requests: int, chunk: float) -> Places:
        """For one that comes now. What running ones share stays shared until they end.

        chunk: prompt tokens of a step; a place is taken while they are computed, too.
        Of a long queue several in a row are taken as one: a submission must not wait for it."""
        unused = engine.block_size / 2
        held = [(now + unused, left) for now, left in map(self._growth, _running(engine))]
        places = Places(held, self._capacity(engine) + _num_saved(engine), max_requests)
        queue = [*map(self._growth, engine.queue)]
        if not queue:
            return places
        own = 1.0 - engine.num_shared_tokens / max(1, engine.num_waiting_tokens)
        each = sum([now * own + left for now, left in queue]) / len(queue) + unused
        most = min(max_requests, places.capacity / each) * LUMP  # at a time
        size = max(1, min(-(-len(queue) // WALKED), int(most)))
        for begin in range(0, len(queue), size):
            part = queue[begin : begin + size]
            tokens, output = (sum(column) / len(part) for column in zip(*part, strict=True))
            places.add(tokens * own + unused, output + tokens * own / chunk, len(part))
        return places

    def _capacity(self, engine: EngineView) -> float:
        return engine.num_blocks * engine.block_size * (1.0 - self.reserve)

    def _growth(self, view: RequestView) -> tuple[int, int]:
        """(tokens held once its prompt is in, tokens expected beyond them)."""
        total = view.max_length - view.num_prompt_tokens
        expected = max(int(total * self.expected_share), view.num_output_tokens + 1)
        return view.num_tokens, max(
            0, min(view.max_length, view.num_prompt_tokens + expected) - view.num_tokens
        )


def _running(engine: EngineView) -> list[RequestView]:
    return [*engine.decoding, *engine.prefilling]


def _num_saved(engine: EngineView) -> int:
    """Tokens of running requests that need no memory, as others hold them."""
    num_used = (engine.num_blocks - engine.num_free_blocks) * engine.block_size
    # What they have computed lies in blocks; those of prompts may still lack some.
    views = _running(engine)
    return max(0, sum([min(v.num_tokens, v.num_computed_tokens) for v in views]) - num_used)
