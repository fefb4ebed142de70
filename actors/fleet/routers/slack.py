"""Routing by what a request costs there, and by what is promised."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from actors.fleet.fleet import Fleet, Prospect, Sight
from actors.fleet.routers.base import Router
from actors.fleet.snapshot import Arrival


class Slack(Router):
    """The least work among the engines that can promise the request; else the least late one.

    Work is what the request adds and meets: (tokens to compute after prefix hits, those of the
    queue included) x (requests there, with this one), as in LMetric (arXiv 2603.15202). It has no
    weight to tune: where loads are alike the hit decides, where hits are alike the load.
    """

    reads_outlook: ClassVar[bool] = True

    def pick(
        self, sights: Sequence[Sight], arrival: Arrival, fleet: Fleet, now_s: float
    ) -> Prospect:
        prospects = fleet.prospects(arrival, sights)
        best = min(zip(prospects, sights, strict=True), key=lambda both: _rank(*both))
        return best[0]


def _rank(there: Prospect, sight: Sight) -> tuple[bool, float]:
    work = (sight.num_prefill_tokens + there.num_new_tokens) * (sight.num_live + 1)
    if there.keeps is not False:
        return (False, float(work))
    return (True, there.ttft_s if not math.isnan(there.ttft_s) else float(work))
