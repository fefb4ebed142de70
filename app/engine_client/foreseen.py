"""Refusals that follow from earlier ones.

While more requests arrive than can be served, a server refuses most of them, on the cores on which
its steps run. A refusal by the scheduler therefore says for how long longer prompts would be
refused too (`Refuse.closed_s`), and these are refused here, before anything is prepared for them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from actors.scheduling.events import MayReturn, Refuse
from actors.scheduling.request import Objective, Request
from app.engine_client.client import GenerationRequest, RequestRefused

_MOST = 8  # refusals in force: later ones say little more
_MOST_PLACES = 4096  # of requests that may return


@dataclass(slots=True)
class _Closed:
    """A refusal in force until until_s, for requests that would be served after the refused one.

    These have prompts of num_tokens or more, the same tenant, this priority or a lower one, and an
    objective of ttft_s (infinite: none) or less. retry_at_s: when the next one refused may return.
    """

    until_s: float
    num_tokens: int
    tenant: str
    priority: int
    ttft_s: float
    refusal: Refuse
    retry_at_s: float


class ForeseenRefusals:
    """Refusals foreseen for one engine. Times are on one clock of the replica."""

    def __init__(self) -> None:
        self._closed: list[_Closed] = []
        self._turned_away: list[MayReturn] = []
        # (from_s, until_s) by key: requests that return then are judged by the scheduler.
        self._may_return: dict[int, tuple[float, float]] = {}

    def note(self, refusal: Refuse, request: Request, default: Objective, now_s: float) -> None:
        """The scheduler has refused this request. default: objective of requests without one."""
        if refusal.retry_after_s is not None:
            key = MayReturn.key_of(request.tenant, request.prompt)
            self._keep_place(MayReturn(key, refusal.each_s, refusal.retry_after_s), now_s)
        if refusal.closed_s > 0.0 and refusal.retry_after_s is not None:
            until_s = now_s + refusal.closed_s
            retry_at_s = now_s + refusal.retry_after_s + refusal.each_s
            limits = (request.tenant, request.priority, _ttft_s(request.objective, default))
            closed = _Closed(until_s, len(request.prompt), *limits, refusal, retry_at_s)
            self._closed.append(closed)
            del self._closed[:-_MOST]

    def find(
        self, request: GenerationRequest, default: Objective, now_s: float
    ) -> RequestRefused | None:
        """The refusal of this request, counted as turned away; None if it is to be submitted."""
        self._closed = [one for one in self._closed if one.until_s > now_s]
        if not self._closed:
            return None
        key = MayReturn.key_of(request.tenant, request.prompt)
        from_s, until_s = self._may_return.get(key, (math.inf, 0.0))
        if from_s <= now_s < until_s:
            return None
        num_tokens, limit_s = len(request.prompt), _ttft_s(request.objective, default)
        for one in self._closed:
            is_behind = request.tenant == one.tenant and request.priority <= one.priority
            if is_behind and num_tokens >= one.num_tokens and limit_s <= one.ttft_s:
                return self._turn_away(request, key, one.refusal, now_s)
        return None

    def _turn_away(
        self, request: GenerationRequest, key: int, refusal: Refuse, now_s: float
    ) -> RequestRefused:
        """Refused one after the other, they are to return one after the other."""
        retry_at_s = max(one.retry_at_s for one in self._closed)
        for one in self._closed:
            one.retry_at_s = retry_at_s + refusal.each_s
        wait_s = retry_at_s - now_s
        whose = (request.tenant, request.priority)
        self._turned_away.append(MayReturn(key, refusal.each_s, wait_s, *whose))
        self._keep_place(self._turned_away[-1], now_s)
        return RequestRefused(refusal.message, param=refusal.param, retry_after_s=wait_s)

    def _keep_place(self, one: MayReturn, now_s: float) -> None:
        after_s, before_s = one.expected_s
        self._may_return.pop(one.key, None)  # the newest are the last
        self._may_return[one.key] = (now_s + after_s, now_s + before_s)
        if len(self._may_return) > _MOST_PLACES:
            del self._may_return[next(iter(self._may_return))]

    def pop_turned_away(self) -> list[MayReturn]:
        """For `events.TurnedAway`: what has been turned away since the last call."""
        turned_away, self._turned_away = self._turned_away, []
        return turned_away


def _ttft_s(objective: Objective, default: Objective) -> float:
    return objective.ttft_s or default.ttft_s or math.inf
