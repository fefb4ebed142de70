"""Copies of streams' KV to the engines that will continue them, in the course that live fronts take
(`app.fleet.stream_copies`), with its limits; the streams go on meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

from actors.fleet.moves import COPIED_WITHIN_S, LAST_BLOCK_WITHIN_S
from actors.scheduling.events import FetchEarly, SaveNow
from actors.scheduling.state import RequestState, RequestStatus
from app.simulate.run.engine import SimulatedEngine
from app.simulate.run.replica import Replica

Waits = Generator[Callable[[], bool], None, None]  # each is waited for; TimeoutError is thrown in


@dataclass(slots=True)
class Copy:
    """One stream whose KV is copied. is_fetching: its target begins no other copy yet. is_whole:
    all but its last block is there. until_s: its next wait ends then, at the latest."""

    stream_id: int
    source: SimulatedEngine
    target: SimulatedEngine
    num_tokens: int
    is_fetching: bool = True
    is_whole: bool = False
    until_s: float = 0.0
    waits_for: Callable[[], bool] = lambda: True
    course: Waits | None = None


class StreamCopies:
    """is_alive: whether an engine is there. touched: an engine's next event may have changed. at:
    calls back at a time. done: called with a copy that has come to its end, when it is no longer
    open. more: another may begin to leave this engine.

    Call `look` after each event of an engine.
    """

    def __init__(
        self,
        is_alive: Callable[[SimulatedEngine], bool],
        touched: Callable[[Replica, float], None],
        at: Callable[[float, Callable[[float], None]], None],
        done: Callable[[Copy, float], None],
        more: Callable[[SimulatedEngine, float], None],
    ) -> None:
        self._is_alive = is_alive
        self._touched = touched
        self._at = at
        self._done = done
        self._more = more
        self._now_s = 0.0
        self._is_looking = False
        self.open: dict[int, Copy] = {}  # by stream

    @property
    def busy(self) -> set[str]:
        """Engines that fetch for a stream."""
        return {copy.target.name for copy in self.open.values() if copy.is_fetching}

    @property
    def expected(self) -> tuple[tuple[str, int], ...]:
        """See `Arrival.expected`."""
        return tuple([(copy.target.name, copy.num_tokens) for copy in self.open.values()])

    def begin(
        self, state: RequestState, source: SimulatedEngine, target: SimulatedEngine, now_s: float
    ) -> None:
        """Copy this stream of `source`. `look` must follow."""
        copy = Copy(state.request_id, source, target, state.num_tokens)
        copy.course = self._course(copy, state)
        self.open[state.request_id] = copy
        self._until(copy, now_s + COPIED_WITHIN_S)

    def lost(self, engine: SimulatedEngine) -> None:
        """An engine is gone: what left it is elsewhere."""
        self.open = {k: copy for k, copy in self.open.items() if copy.source is not engine}

    def look(self, now_s: float) -> None:
        """Continue those that need not wait longer."""
        if self._is_looking:
            return
        self._is_looking, self._now_s = True, now_s
        again = True
        while again:
            again = False
            for copy in list(self.open.values()):
                if self.open.get(copy.stream_id) is not copy:
                    continue
                if copy.waits_for():
                    self._continue(copy, timed_out=False)
                elif now_s >= copy.until_s:
                    self._continue(copy, timed_out=True)
                else:
                    continue
                again = True
        self._is_looking = False

    def _continue(self, copy: Copy, timed_out: bool) -> None:
        assert copy.course is not None
        try:
            if timed_out:
                copy.waits_for = copy.course.throw(TimeoutError())
            else:
                copy.waits_for = next(copy.course)
        except (StopIteration, TimeoutError):
            self.open.pop(copy.stream_id, None)
            self._done(copy, self._now_s)

    def _course(self, copy: Copy, state: RequestState) -> Waits:
        num_missing = yield from self._fetched(copy, state)
        copy.is_whole = num_missing <= 1  # the last may have been completed meanwhile
        copy.is_fetching = False
        self._more(copy.source, self._now_s)  # another may have waited for this one
        self._until(copy, self._now_s + LAST_BLOCK_WITHIN_S)
        yield _grown(state, lambda: state.num_committed_blocks)
        yield from self._fetched(copy, state, is_last=True)
        yield _grown(state, lambda: state.num_tokens)

    def _until(self, copy: Copy, time_s: float) -> None:
        copy.until_s = time_s
        self._at(time_s, self.look)

    def _fetched(
        self, copy: Copy, state: RequestState, is_last: bool = False
    ) -> Generator[Callable[[], bool], None, int]:
        """Its blocks are saved and fetched, or given up; returns how many are not there."""
        source, target = copy.source.replica, copy.target.replica
        size, tier = target.core.config.block_size, target.core.tier
        assert tier is not None
        digests = state.block_hashes((state.num_tokens - 1) // size, size)  # of what is computed
        source.submit(SaveNow(tuple(digests) if is_last else ()), self._now_s)
        self._touched(source, self._now_s)
        if self._is_alive(copy.target):
            target.submit(FetchEarly(tuple(digests), is_last), self._now_s)
            self._touched(target, self._now_s)
            yield (
                lambda: (
                    not self._is_alive(copy.target)
                    or not any(map(tier.is_coming, reversed(digests)))
                )
            )
        return len(digests) - len(target.core.requests.running.block_manager.match(digests))


def _grown(state: RequestState, size: Callable[[], int]) -> Callable[[], bool]:
    """Whether this has changed, or the stream runs no longer."""
    before = size()
    return lambda: state.status is not RequestStatus.RUNNING or size() != before
