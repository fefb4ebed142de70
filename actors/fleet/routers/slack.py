"""Routing by the work a request causes, weighed by the slack of its objectives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from actors.fleet.fleet import PATIENCE_S, Fleet, FleetEngine, Prospect
from actors.fleet.routers.base import Router
from actors.fleet.snapshot import Arrival

LEAST_TOKENS = 64  # least cost of a request: it takes a step of its own, and decodes
WASTE = 8.0  # weight of recomputed tokens where all are late: they delay later requests
IDLE_SHARE = 0.1  # of the TTFT objective: an engine with less work counts as idle


class SlackRouter(Router):
    """The least work over slack left, among the engines that can keep the request's objectives.

    Work is the tokens to compute after prefix hits, times the requests on the engine, each of which
    they delay. Slack left is the share of the objective that the predicted latency leaves. With
    much slack left the request waits at the engine that holds its prefix, since computing the
    prefix elsewhere would delay the requests there; near the limit the cost grows without bound,
    and the prefix is computed on another engine. A router that minimizes the delay of each request,
    or tokens times load (LMetric, arXiv 2603.15202), leaves the prefix whenever another queue is
    shorter, and in a busy fleet recomputes prefixes all the time.

    A prefix is computed again only at an idle engine (its work takes at most `IDLE_SHARE` of the
    objective), and only while the engines without the prefix are idle on average. Elsewhere it
    would delay other requests for longer than it gains; and in a busy fleet some engine is always
    idle for a moment, and every recomputation makes the next more likely.

    If no engine can keep the objectives, the least sum of the request's delay and `WASTE` times its
    work decides. Engines without predictions are compared by tokens times load.
    """

    reads_outlook: ClassVar[bool] = True

    def pick(
        self, engines: Sequence[FleetEngine], arrival: Arrival, fleet: Fleet, now_s: float
    ) -> Prospect:
        prospects = fleet.prospects(arrival, engines)
        most = max([there.num_cached_tokens for there in prospects])
        least = most - LEAST_TOKENS  # an engine that holds fewer would recompute the prefix
        anew_s = [
            _work_s(engine)
            for there, engine in zip(prospects, engines, strict=True)
            if there.num_cached_tokens < least
        ]
        mean_s = sum(anew_s) / max(len(anew_s), 1)

        def rank(both: tuple[Prospect, FleetEngine]) -> tuple[bool, int, float]:
            there, engine = both
            is_dear = there.num_cached_tokens < least and (
                max(mean_s, _work_s(engine)) > IDLE_SHARE * _wanted_s(engine, arrival)
            )
            return (is_dear, *_rank(there, engine))

        return min(zip(prospects, engines, strict=True), key=rank)[0]


def _wanted_s(engine: FleetEngine, arrival: Arrival) -> float:
    return arrival.objective.ttft_s or engine.snapshot.ttft_s or PATIENCE_S


def _work_s(engine: FleetEngine) -> float:
    """Time that its unfinished prompts take; 0.0 without predictions."""
    rate = engine.snapshot.outlook.prefill_rate
    return engine.num_prefill_tokens / rate if rate else 0.0


def _rank(there: Prospect, engine: FleetEngine) -> tuple[int, float]:
    work = there.num_new_tokens + LEAST_TOKENS
    if math.isnan(there.slack):
        return (1, float((engine.num_prefill_tokens + work) * (engine.num_live + 1)))
    if there.slack > 0.0:
        return (0, work * (engine.num_live + 1) / there.slack)
    return (2, there.ttft_s + WASTE * work / max(engine.snapshot.outlook.prefill_rate, 1.0))
