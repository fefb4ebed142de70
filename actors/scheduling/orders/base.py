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
