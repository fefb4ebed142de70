"""What an order is: the waiting queue, and the rank that every request keeps while running."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from actors.scheduling.state import RequestState


class Order(ABC):
    """Holds WAITING requests and says which is next.

    `rank` (smaller is better) is set on entry and decides, among running requests, which is
    planned first and which is preempted last. Requests that leave by abort just change status;
    orders skip those that are no longer WAITING.
    """

    follows_service = False  # wants `admit`, `serve` and `finish` called
    preempts = False  # the next request may take the slot of a running one of a worse rank

    @abstractmethod
    def push(self, state: RequestState, now_s: float) -> None:
        """A new request enters; sets its rank."""

    @abstractmethod
    def adopt(self, state: RequestState) -> None:
        """Set the rank of a request that does not wait here (the order was switched)."""

    @abstractmethod
    def restore(self, state: RequestState, now_s: float) -> None:
        """A preempted request comes back, before its peers."""

    @abstractmethod
    def peek(self, now_s: float) -> RequestState | None:
        """The next request; None when none waits."""

    @abstractmethod
    def pop(self) -> RequestState:
        """Remove and return what the last `peek` returned (it starts, or is set aside)."""

    @abstractmethod
    def drain(self) -> list[RequestState]:
        """Every waiting request, best first, leaving the order empty (the order is switched)."""

    # ---- hooks for orders whose ranks change with service --------------------------------

    def admit(self, state: RequestState) -> None:  # noqa: B027  # a hook, not a duty
        """The popped request starts for the first time."""

    def serve(self, states: Sequence[RequestState]) -> None:  # noqa: B027
        """Each of these has just been given an output token."""

    def finish(self, state: RequestState) -> None:  # noqa: B027
        """The request reached its end (not called for aborts)."""

    def rerank(self, running: Iterable[RequestState], now_s: float) -> bool:
        """Change ranks of running requests by what they have been served; whether any changed.

        Called by policies that preempt by rank.
        """
        return False
