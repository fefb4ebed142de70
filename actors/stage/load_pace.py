"""When a thread may load adapters beside the steps: for as long as their plans allow. A thread that
hangs is left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress

_MOST_LEFT = 4  # threads of loads that hang
IDLE_S = 0.02  # without a step from which the stage is idle; busy stages wait less for their next


class _Thread(threading.Thread):
    """is_left: nobody waits for its load any longer, and it touches nothing more."""

    is_left = False


class Loads:
    """One load after the other, each in a thread of its own: one that hangs, as on a folder of a
    network, costs no other load its time. Until it ends, its folder is refused: callers ask again
    and again, and each further load of it would hang too."""

    def __init__(self) -> None:
        self._leave: Callable[[], None] = lambda: None
        self._left: list[tuple[str, _Thread]] = []  # by folder

    def run(self, folder: str, prepare: Callable[[], None], load: Callable[[], None]) -> str | None:
        """An error message or None, once the load has ended or is left."""
        self._left = [(name, thread) for name, thread in self._left if thread.is_alive()]
        hung = [name for name, _ in self._left]
        if folder in hung:
            return f"{folder}: not loaded, as an earlier load of it still hangs"
        if len(hung) >= _MOST_LEFT:
            return f"{folder}: not loaded, as loads of {', '.join(hung)} still hang"
        outcome: Future[None] = Future()

        def work() -> None:
            try:
                prepare()  # a setting of each thread
                load()
            except BaseException as error:  # of any type: the caller raises it
                _settle(outcome, error)
            else:
                _settle(outcome, None)

        thread = _Thread(target=work, daemon=True)

        def leave() -> None:
            thread.is_left = True
            _settle(outcome, OSError("the load is left, as it took too long"))

        self._leave = leave
        thread.start()
        try:
            outcome.result()
        except (ValueError, OSError) as error:
            if thread.is_left:
                self._left.append((folder, thread))
            return str(error)
        return None

    def leave(self) -> None:
        """Leave the load that is under way."""
        self._leave()


def _settle(outcome: Future[None], error: BaseException | None) -> None:
    """Only the first call counts."""
    with suppress(InvalidStateError):
        if error is None:
            outcome.set_result(None)
        else:
            outcome.set_exception(error)


def check_wanted() -> None:
    """Raise OSError in the thread of a load that has been left."""
    if getattr(threading.current_thread(), "is_left", False):
        raise OSError("the load was left, as it took too long")


class LoadPace:
    """Steps call `step`, and a thread that loads calls `pause` between its pieces.

    A load's time is that by the clock, the upper bound of what it takes from a step on any device.
    A piece that ends too late shortens the time beside the next step. An idle stage loads freely.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._left_s = 0.0  # beside the newest step; negative: taken too much
        self._runs = False  # whether a step does
        self._step_s = -IDLE_S  # when the newest one began; the end is when it is not running
        self._ended_s = -IDLE_S
        self._piece_s = 0.0  # when the piece under way began

    @contextmanager
    def step(self, adapter_load_s: float) -> Iterator[None]:
        """Around a step. adapter_load_s: as in `StepPlan`."""
        with self._changed:
            self._left_s = adapter_load_s + min(0.0, self._left_s)
            self._runs, self._step_s = True, self._clock()
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._runs, self._ended_s = False, self._clock()
                self._changed.notify_all()

    def begin(self) -> None:
        """Wait until a first piece may begin."""
        with self._changed:
            self._wait()

    def pause(self) -> None:
        """A piece has ended: wait until the next one may begin."""
        with self._changed:
            if not self._is_idle():
                self._left_s -= self._clock() - max(self._piece_s, self._step_s)
            self._wait()

    def _is_idle(self) -> bool:
        return not self._runs and self._clock() - self._ended_s >= IDLE_S

    def _wait(self) -> None:
        check_wanted()
        while self._left_s <= 0.0 and not self._is_idle():
            left_s = IDLE_S - (self._clock() - self._ended_s)
            self._changed.wait(None if self._runs else left_s)
            check_wanted()  # it may have been left meanwhile
        self._piece_s = self._clock()
