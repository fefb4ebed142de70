"""Admission by memory: the predicted peak of KV use, as running requests grow and finish.

A request starts only if the peak stays within the cache (the method of LightLLM's scheduler).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.events import MayReturn, Refuse
from actors.scheduling.interfaces import EngineView, RequestView, StepTimePredictor
from actors.scheduling.registry import within
from actors.scheduling.request import Request


def peak_kv_tokens(requests: Iterable[tuple[int, int]], num_saved: int = 0) -> int:
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
    peak, held, ended = 0, 0, sum([now for now, _ in ordered])
    for count, (now, left) in enumerate(ordered, start=1):
        held, ended = held + now, ended - now
        peak = max(peak, held + count * left - max(0, num_saved - ended))
    return peak


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
        running = (*engine.decoding, *engine.prefilling)
        held = [self._growth(view) for view in (*running, *starting)]
        num_used = (engine.num_blocks - engine.num_free_blocks) * engine.block_size
        # What they have computed lies in blocks; those of prompts may still lack some.
        computed = sum([min(view.num_tokens, view.num_computed_tokens) for view in running])
        num_saved = max(0, computed - num_used) + num_held
        capacity = engine.num_blocks * engine.block_size * (1.0 - self.reserve)
        # Requests occupy whole blocks, of which half a block is unused on average.
        return capacity - peak_kv_tokens(held, num_saved) - len(held) * engine.block_size / 2

    def _growth(self, view: RequestView) -> tuple[int, int]:
        """(tokens held once its prompt is in, tokens expected beyond them)."""
        total = view.max_length - view.num_prompt_tokens
        expected = max(int(total * self.expected_share), view.num_output_tokens + 1)
        return view.num_tokens, max(
            0, min(view.max_length, view.num_prompt_tokens + expected) - view.num_tokens
        )
