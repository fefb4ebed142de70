"""The base class of orders: the waiting requests, and the key that each keeps while running."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.state import RequestState


class Order(ABC):
    """Holds WAITING requests and chooses the next.

    `order_key` (smaller is earlier) is set on entry and decides, among running requests, which is
    planned first and which is preempted last. Requests that leave by abort just change status;
    orders skip those that are no longer WAITING.
    """

    follows_service = False  # whether `admit`, `serve` and `finish` must be called
    preempts = False  # whether the next request may replace a running one of a worse key

    def goes_before(self, state: RequestState, other: RequestState) -> bool:
        """Whether `state` would be the next of these two, waiting alone."""
        return state.order_key < other.order_key

    def place(self, state: RequestState) -> tuple[bool, tuple[float, int]]:
        """By it, smaller first, those of one tenant that are set aside come back."""
        return False, state.order_key

    @abstractmethod
    def push(self, state: RequestState, now_s: float) -> None:
        """Add a new request, and set its key."""

    @abstractmethod
    def adopt(self, state: RequestState) -> None:
        """Set the key of a request that is not pushed: of a running one after a switch of the
        order, or of a suspect."""

    @abstractmethod
    def restore(self, state: RequestState, now_s: float) -> None:
        """Add a request that comes back (preempted, or set aside) before those of equal key."""

    @abstractmethod
    def peek(self, now_s: float) -> RequestState | None:
        """The next request; None when none waits."""

    @abstractmethod
    def pop(self) -> RequestState:
        """Remove and return the request that the last `peek` returned."""

    def use(self, config: SchedulerConfig) -> None:  # noqa: B027  # an optional hook
        """Apply changed settings."""

    def set_aside(self) -> RequestState:
        """As `pop`, of one that does not start: it waits elsewhere until `restore` or `remove`."""
        return self.pop()

    def remove(self, state: RequestState) -> None:  # noqa: B027
        """A waiting request has ended, here or set aside."""

    @abstractmethod
    def drain(self) -> list[RequestState]:
        """Remove all waiting requests, best first, for a switch of the order."""

    # ---- hooks for orders whose keys change with service --------------------------------

    def admit(self, state: RequestState) -> None:  # noqa: B027  # an optional hook
        """The popped request starts for the first time."""

    def serve(self, states: Sequence[RequestState]) -> None:  # noqa: B027
        """Each of these requests has got an output token."""

    def charge(self, num_tokens: Mapping[RequestState, int]) -> None:  # noqa: B027
        """A step computes so many tokens of these requests, prompts included.

        Called by policies that preempt by order, and for drafts that were accepted.
        """

    def finish(self, state: RequestState) -> None:  # noqa: B027
        """The request has finished (not called for aborts)."""

    def rerank(self, running: Iterable[RequestState], now_s: float) -> bool:
        """Change keys of running requests by the service they got; returns whether any changed.

        Called by policies that preempt by order.
        """
        return False
