"""Routing by what a request costs there, and by what is promised."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from actors.fleet.fleet import PATIENCE_S, Fleet, FleetEngine, Prospect
from actors.fleet.routers.base import Router
from actors.fleet.snapshot import Arrival

LEAST_TOKENS = 64  # a request is never cheaper: its own step, its decodes
WASTE = 8.0  # where all are late: what a token computed twice costs later requests
IDLE_SHARE = 0.1  # of the TTFT objective: an engine with less work has time to spare


class SlackRouter(Router):
    """The least work for the slack it leaves, among the engines that can promise the request.

    The work is the tokens to compute after prefix hits times the requests there, each of which
    they delay; the slack left is the share of its objectives that remains beside what the engine
    predicts. While much is left, the engine that holds the prefix is worth waiting at, since
    computing it elsewhere would delay the requests there; as the promise nears its limit the price
    rises without bound, and the prefix is computed anew where there is time. A router that
    minimises its own request's delay, or tokens times load (LMetric, arXiv 2603.15202), leaves the
    prefix whenever a queue is shorter elsewhere, and once the fleet is busy it drowns in prefixes
    computed again.

    A prefix is computed anew only where there is time to spare: at an engine whose work takes no
    more than `IDLE_SHARE` of the objective, where that holds on average for all that lack it.
    Elsewhere it delays the requests there for longer than it gains, and in a busy fleet, where one
    of many engines is always idle for a moment, every such move makes the next more likely.

    Where no engine can promise it, the least sum of its delay and (`WASTE` times) its work. Engines
    that predict nothing are compared by tokens times load.
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
    """What its prompts still take; 0.0 where it predicts nothing."""
    rate = engine.snapshot.outlook.prefill_rate
    return engine.num_prefill_tokens / rate if rate else 0.0


def _rank(there: Prospect, engine: FleetEngine) -> tuple[int, float]:
    work = there.num_new_tokens + LEAST_TOKENS
    if math.isnan(there.slack):
        return (1, float((engine.num_prefill_tokens + work) * (engine.num_live + 1)))
    if there.slack > 0.0:
        return (0, work * (engine.num_live + 1) / there.slack)
    return (2, there.ttft_s + WASTE * work / max(engine.snapshot.outlook.prefill_rate, 1.0))
