"""A load beside steps takes the time that their plans leave, and all of an idle stage's."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from actors.stage.load_pace import IDLE_S, LoadPace, Loads, check_wanted

LONG_S = 20.0  # for what happens at once


class Stage:
    """A pace whose clock only the test moves, and a thread that loads pieces of 3 ms."""

    def __init__(self, num_pieces: int = 1000) -> None:
        self.now_s = 100.0
        self.pace = LoadPace(lambda: self.now_s)
        self.num_pieces = 0  # done
        self._most = num_pieces
        self._goes_on = threading.Semaphore(0)
        self._rests = threading.Semaphore(0)
        self._wait = self.pace._changed.wait
        self.pace._changed.wait = self._noted  # type: ignore[method-assign]
        self.thread = threading.Thread(target=self._load, daemon=True)

    def _noted(self, timeout: float | None = None) -> bool:
        """Where the thread rests until a step or the clock lets it go on."""
        self._rests.release()
        return self._wait(timeout if timeout is None else LONG_S)

    def _load(self) -> None:
        self.pace.begin()
        for _ in range(self._most):
            self.now_s += 0.003
            self.num_pieces += 1
            self.pace.pause()
        self._rests.release()

    def rests(self) -> int:
        """Pieces that are done once the thread waits, or has ended."""
        assert self._rests.acquire(timeout=LONG_S)
        return self.num_pieces


@pytest.fixture
def step() -> Callable[[Stage, float], int]:
    """Begins and ends a step; the pieces done when it ends."""

    def run(stage: Stage, load_s: float) -> int:
        with stage.pace.step(load_s):
            done = stage.rests()
        stage.rests()  # woken by the end
        return done

    return run


def test_an_idle_stage_loads_freely() -> None:
    stage = Stage(num_pieces=50)
    stage.thread.start()
    stage.thread.join(LONG_S)
    assert stage.num_pieces == 50


def test_beside_steps_it_takes_what_they_leave(step: Callable[[Stage, float], int]) -> None:
    stage = Stage()
    with stage.pace.step(0.0):
        stage.thread.start()
        assert stage.rests() == 0
    stage.rests()
    assert step(stage, 0.009) == 3
    # A fourth piece of 3 ms where 10 are left: two more than that are owed.
    assert step(stage, 0.010) == 3 + 4
    assert step(stage, 0.002) == 7  # which pays them back
    assert step(stage, 0.0001) == 8
    stage.now_s += 2 * IDLE_S
    with stage.pace.step(0.0):
        assert stage.rests() == 8  # owed still


def test_after_its_last_step_the_rest_is_loaded() -> None:
    stage = Stage(num_pieces=5)
    with stage.pace.step(0.001):
        stage.thread.start()
        assert stage.rests() == 1
    stage.rests()
    stage.now_s += 2 * IDLE_S
    with stage.pace._changed:
        stage.pace._changed.notify_all()
    stage.thread.join(LONG_S)
    assert stage.num_pieces == 5


def test_a_load_that_hangs_is_left_and_touches_nothing_more() -> None:
    loads, pace, done = Loads(), LoadPace(), list[str]()
    hangs, goes_on, ended = threading.Event(), threading.Event(), threading.Event()

    def hang() -> None:
        try:
            hangs.set()
            goes_on.wait()
            for step in (check_wanted, pace.begin, pace.pause):
                with pytest.raises(OSError, match="was left"):
                    step()
            done.append("refused")
        finally:
            ended.set()

    leaver = threading.Thread(target=lambda: (hangs.wait(), loads.leave()))
    leaver.start()
    assert loads.run("hangs", lambda: None, hang) == "the load is left, as it took too long"
    leaver.join()
    assert loads.run("next", lambda: done.append("prepared"), lambda: done.append("loaded")) is None
    loads.leave()  # none is under way
    goes_on.set()
    assert ended.wait(LONG_S)
    assert done == ["prepared", "loaded", "refused"]


@pytest.mark.parametrize("wait", ["begin", "pause"])
def test_a_load_left_while_it_waits_for_its_turn_touches_nothing_more(wait: str) -> None:
    pace, loads, errors = LoadPace(), Loads(), list[str]()
    waits, threads = threading.Event(), list[threading.Thread]()
    rest = pace._changed.wait

    def noted(timeout: float | None = None) -> bool:
        waits.set()
        return rest(timeout)

    pace._changed.wait = noted  # type: ignore[method-assign]

    def load() -> None:
        threads.append(threading.current_thread())
        try:
            getattr(pace, wait)()
        except OSError as error:
            errors.append(str(error))

    with pace.step(0.0):
        leaver = threading.Thread(target=lambda: (waits.wait(), loads.leave()))
        leaver.start()
        assert loads.run("it", lambda: None, load) == "the load is left, as it took too long"
        leaver.join()
    threads[0].join(LONG_S)
    assert errors == ["the load was left, as it took too long"]


def test_folders_that_hang_hold_few_threads_and_one_each() -> None:
    loads, goes_on, threads = Loads(), threading.Event(), list[threading.Thread]()

    def hang() -> None:
        threads.append(threading.current_thread())
        loads.leave()
        goes_on.wait()

    def nothing() -> None:
        pass

    for number in range(4):
        assert loads.run(f"{number}", nothing, hang) == "the load is left, as it took too long"
        told = f"{number}: not loaded, as an earlier load of it still hangs"
        assert loads.run(f"{number}", nothing, nothing) == told
    told = "4: not loaded, as loads of 0, 1, 2, 3 still hang"
    assert loads.run("4", nothing, nothing) == told
    assert len(threads) == 4
    goes_on.set()
    for thread in threads:
        thread.join(LONG_S)
    assert loads.run("0", nothing, nothing) is None


@pytest.mark.parametrize(("error", "told"), [(OSError("gone"), "gone"), (ValueError("7"), "7")])
def test_what_a_load_raises_is_told_or_raised(error: Exception, told: str) -> None:
    def fail(error: Exception) -> Callable[[], None]:
        def load() -> None:
            raise error

        return load

    assert Loads().run("it", lambda: None, fail(error)) == told
    with pytest.raises(RuntimeError, match="device"):
        Loads().run("it", lambda: None, fail(RuntimeError("device")))
