"""The simplest budget and the simplest admission: a fixed number, and everybody."""

from __future__ import annotations

from dataclasses import dataclass

from actors.scheduling.interfaces import EngineView, Refusal, RequestView, StepShape
from actors.scheduling.request import Request


@dataclass(frozen=True, slots=True)
class FixedBudget:
    """A constant token budget, chosen once from a profile (Sarathi-Serve, section 4.3)."""

    tokens: int

    def num_tokens(self, shape: StepShape, engine: EngineView) -> int:
        return self.tokens

    def observe(self, shape: StepShape, duration_s: float) -> None:
        """A constant learns nothing."""


@dataclass(frozen=True, slots=True)
class AcceptAll:
    """First come, first queued; memory and slots alone decide when a request starts."""

    def on_submit(self, request: Request, engine: EngineView) -> Refusal | None:
        return None

    def may_start(self, request: RequestView, engine: EngineView) -> bool:
        return True
