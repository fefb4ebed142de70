"""Routing by what a request costs there, and by what is promised."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from actors.fleet.fleet import PATIENCE_S, Fleet, Prospect, Sight
from actors.fleet.routers.base import Router
from actors.fleet.snapshot import Arrival

LEAST_TOKENS = 64  # a request is never cheaper: its own step, its decodes
WASTE = 8.0  # where all are late: what a token computed twice costs those who come after
IDLE_SHARE = 0.1  # of the TTFT objective: an engine with less work than that has time to spare


class Slack(Router):
    """The least work for the slack it leaves, among the engines that can promise the request.

    Its work is the tokens to compute after prefix hits times the requests there, each of which
    they delay; the slack left is the share of its objectives that remains beside what the engine
    predicts. While much is left, the engine that
    holds the prefix is worth waiting at, since computing it elsewhere would take time from
    everybody; as the promise nears its limit the price rises without bound, and the prefix is
    computed anew where there is time. A router that minimises its own request's delay, or tokens
    times load (LMetric, arXiv 2603.15202), leaves the prefix whenever a queue is shorter elsewhere,
    and once the fleet is busy it drowns in prefixes computed again.

    A prefix is computed anew only where there is time to spare: at an engine whose work would not
    take `IDLE_SHARE` of the objective. Elsewhere it delays those who are there for longer than it
    gains, and where all engines are busy every such move makes the next more likely.

    Where nobody can promise it, the least sum of its delay and (`WASTE` times) its work. Engines
    that predict nothing are compared by tokens times load.
    """

    reads_outlook: ClassVar[bool] = True

    def pick(
        self, sights: Sequence[Sight], arrival: Arrival, fleet: Fleet, now_s: float
    ) -> Prospect:
        prospects = fleet.prospects(arrival, sights)
        most = max([there.num_cached_tokens for there in prospects])

        def rank(both: tuple[Prospect, Sight]) -> tuple[bool, int, float]:
            there, sight = both
            is_anew = most - there.num_cached_tokens > LEAST_TOKENS
            return (is_anew and _is_busy(there, sight, arrival), *_rank(there, sight))

        return min(zip(prospects, sights, strict=True), key=rank)[0]


def _is_busy(there: Prospect, sight: Sight, arrival: Arrival) -> bool:
    """By its own prediction; one that makes none is taken for idle."""
    if math.isnan(there.slack):
        return False
    wanted_s = arrival.objective.ttft_s or sight.snapshot.ttft_s or PATIENCE_S
    work_s = sight.num_prefill_tokens / max(sight.snapshot.outlook.prefill_rate, 1.0)
    return work_s > IDLE_SHARE * wanted_s


def _rank(there: Prospect, sight: Sight) -> tuple[int, float]:
    work = there.num_new_tokens + LEAST_TOKENS
    if math.isnan(there.slack):
        return (1, float((sight.num_prefill_tokens + work) * (sight.num_live + 1)))
    if there.slack > 0.0:
        return (0, work * (sight.num_live + 1) / there.slack)
    return (2, there.ttft_s + WASTE * work / max(sight.snapshot.outlook.prefill_rate, 1.0))
