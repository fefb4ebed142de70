"""What an order is: the waiting queue, and the rank that everybody keeps while running."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from actors.scheduling.state import RequestState


class Order(Protocol):
    """Holds WAITING requests and says who is next.

    `rank` (smaller is better) is set on entry and decides, among running requests, who is
    planned first and who is preempted last. Requests that leave by abort just change status;
    orders skip whoever is no longer WAITING.
    """

    counts_tokens: bool  # wants `serve` called

    def push(self, state: RequestState, now_s: float) -> None:
        """A new request enters; sets its rank."""
        ...

    def adopt(self, state: RequestState) -> None:
        """Set the rank of a request that does not wait here (the order was switched)."""
        ...

    def restore(self, state: RequestState, now_s: float) -> None:
        """A preempted request comes back, before its peers."""
        ...

    def peek(self, now_s: float) -> RequestState | None:
        """Who is next; None when nobody waits."""
        ...

    def pop(self) -> RequestState:
        """Remove and return what the last `peek` returned (it starts, or is set aside)."""
        ...

    def admit(self, state: RequestState) -> None:
        """The popped request starts for the first time."""
        ...

    def serve(self, states: Sequence[RequestState]) -> None:
        """Each of these has just been given an output token."""
        ...

    def finish(self, state: RequestState) -> None:
        """The request reached its end (not called for aborts)."""
        ...

    def drain(self) -> list[RequestState]:
        """Everybody who waits, best first, leaving the order empty (the order is switched)."""
        ...


# ==== merged from orders/__init__

"""Orders of the waiting queue, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from actors.scheduling.config import ConfigError, SchedulerConfig
from actors.scheduling.queue.order import Order
from actors.scheduling.queue.deadline import EarliestDeadline
from actors.scheduling.queue.fair import VirtualTokenCounter
from actors.scheduling.queue.heap import FirstComeFirstServed, PriorityWithAgeing, ShortestFirst
from actors.scheduling.queue.mlfq import FeedbackLevels

ORDERS: Mapping[str, Callable[..., Order]] = {
    "fcfs": FirstComeFirstServed,
    "priority": PriorityWithAgeing,
    "shortest": ShortestFirst,
    "deadline": EarliestDeadline,
    "fair": VirtualTokenCounter,
    "mlfq": FeedbackLevels,
}


def build_order(name: str, config: SchedulerConfig) -> Order:
    """The named order with `config.order_options`; raises ConfigError for a bad name or option."""
    if name not in ORDERS:
        known = ", ".join(sorted(("auto", *ORDERS)))
        raise ConfigError("order", f"unknown {name!r}; known: {known}")
    try:
        return ORDERS[name](config, **config.order_options)
    except TypeError as error:
        raise ConfigError("order_options", str(error)) from error
