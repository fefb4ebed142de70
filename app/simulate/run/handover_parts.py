"""One request on its way between two simulated engines, and what a run has moved."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.scheduling.request import Request
from actors.scheduling.state import prefix_digests
from app.simulate.run.engine import SimulatedEngine


@dataclass(slots=True)
class Handover:
    """One request on its way.

    digests, source_blocks: of the prompt's full blocks computed so far. num_sent: of these, those
    given to the link. reserved: blocks at the target, once it has room; the first `num_there` of
    them it had already.
    first_token: the request itself, as the target gets it.
    """

    request: Request
    source: SimulatedEngine
    target: SimulatedEngine | None = None
    num_blocks: int = 0
    digests: list[bytes] = field(default_factory=list)
    source_blocks: list[int] = field(default_factory=list)
    reserved: list[int] | None = None
    num_there: int = 0
    num_sent: int = 0
    arrived_s: float = 0.0  # the time at which all that was sent has arrived
    first_token: int | None = None
    is_submitted: bool = False
    _digests: list[bytes] | None = None

    def all_digests(self, block_size: int) -> list[bytes]:
        """Digests of the prompt's full blocks, computed or not; none where only this request has
        them."""
        if self._digests is None:
            salt = self.request.cache_salt
            prompt = () if salt else self.request.prompt[: self.num_blocks * block_size]
            self._digests = prefix_digests(prompt, block_size)
        return self._digests


@dataclass(slots=True)
class HandoverTotals:
    """What a run moved between its engines. handover_s: from the first token to the first step at
    the second engine, of each request that moved."""

    num_requests: int
    num_bytes: float
    busiest_link: float  # share of the run that its transfers take
    handover_s: NDArray[np.float64]

    def to_dict(self) -> dict[str, Any]:
        p50, p99 = np.quantile(self.handover_s, (0.5, 0.99)) if self.num_requests else (0.0, 0.0)
        return {
            "num_requests": self.num_requests,
            "num_bytes": self.num_bytes,
            "busiest_link": self.busiest_link,
            "handover_p50_s": float(p50),
            "handover_p99_s": float(p99),
        }
