"""Which replica takes a request."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Protocol

from actors.scheduling.request import Request
from app.simulate.run.replica import Replica


class Router(Protocol):
    def choose(self, replicas: Sequence[Replica], request: Request) -> Replica:
        """One of the replicas, of which there is at least one."""
        ...


class RoundRobin:
    """Each in turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, replicas: Sequence[Replica], request: Request) -> Replica:
        self._next = (self._next + 1) % len(replicas)
        return replicas[self._next]


class LeastLoaded:
    """The fewest unfinished requests."""

    def choose(self, replicas: Sequence[Replica], request: Request) -> Replica:
        return min(replicas, key=lambda r: r.num_live)


class PowerOfTwo:
    """The less loaded of two drawn at random: near least-loaded, asking two replicas only."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def choose(self, replicas: Sequence[Replica], request: Request) -> Replica:
        if len(replicas) == 1:
            return replicas[0]
        first, second = self._rng.sample(range(len(replicas)), 2)
        a, b = replicas[first], replicas[second]
        return a if a.num_live <= b.num_live else b


class LeastWork:
    """The least prefill work ahead (waiting tokens and unfinished prompts), then fewest decodes.

    That is the most slack for a new prompt: its first token waits for exactly that work.
    """

    def choose(self, replicas: Sequence[Replica], request: Request) -> Replica:
        return min(replicas, key=lambda r: (r.prefill_backlog_tokens(), r.num_live))


ROUTERS: dict[str, Callable[[int], Router]] = {
    "round_robin": lambda seed: RoundRobin(),
    "least_loaded": lambda seed: LeastLoaded(),
    "power_of_two": PowerOfTwo,
    "slack": lambda seed: LeastWork(),
}


def make_router(name: str, seed: int = 0) -> Router:
    """Raises ValueError naming the routers there are."""
    if name not in ROUTERS:
        raise ValueError(f"unknown routing {name!r}; known: {', '.join(sorted(ROUTERS))}")
    return ROUTERS[name](seed)
