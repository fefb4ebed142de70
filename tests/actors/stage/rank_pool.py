"""Processes that hold the ranks of tensor-parallel stages, kept for all tests that need them."""

from __future__ import annotations

import contextlib
import socket
import traceback
from collections.abc import Callable, Container
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from actors.scheduling.plan import StepPlan, StepResult
from tests.actors.transport.rank_processes import rank_processes

_ANSWER_WAIT_S = 120.0  # ranks that wait for each other would never answer


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Inbox:
    """A rank's messages in order. `peek` sees the next one early, as a mailbox does."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._peeked: list[Any] = []

    def receive(self) -> Any:
        return self._peeked.pop() if self._peeked else self._pipe.recv()

    def following(self, wait_s: float) -> StepPlan | None:
        """The plan of the next message; None where it says that there is none, or not yet. Waits
        for the message, however long: what a test sees does not depend on time."""
        kind, payload = message = self.receive()
        if kind == "no plan yet":
            return None
        self._peeked.append(message)
        assert kind == "execute ahead"
        assert isinstance(payload, StepPlan)
        return payload


def serve_rank(rank: int, pipe: Connection) -> None:
    """The life of one process: a chain of stages, all at this rank, driven by messages."""
    from actors.stage.runner import StageRunner
    from actors.stage.spec import StageSpec
    from tests import swift_interpreter
    from tests.gpu.captures import EagerCapture

    swift_interpreter.install()
    runners: list[Any] = []
    inbox = Inbox(pipe)
    while (message := inbox.receive()) is not None:
        kind, payload = message
        try:
            if kind == "make":
                specs, num_blocks, num_host_blocks, capture = payload
                for old in runners:
                    old.close()
                runners = [StageRunner(StageSpec(rank=rank, **spec)) for spec in specs]
                infos = [runner.info for runner in runners]
                for runner in runners:
                    runner.allocate(num_blocks, num_host_blocks)
                    if capture:
                        runner.capture(EagerCapture())
                pipe.send(("ok", infos))
            elif kind == "load_adapter":
                for runner in runners:
                    runner.load_adapter(*payload)
                pipe.send(("ok", None))
            elif kind == "call":
                function, arguments = payload
                pipe.send(("ok", function(runners, *arguments)))
            elif kind == "execute ahead":
                pipe.send(("ok", runners[0].execute(payload, None, inbox.following)))
            elif kind == "execute":
                carried = None
                for runner in runners:
                    carried = runner.execute(payload, carried)
                pipe.send(("ok", carried))
        # The test's process must see any failure, or it would wait for an answer without end.
        except Exception:
            pipe.send(("error", traceback.format_exc()))
    for runner in runners:
        runner.close()


class RanksFailed(RuntimeError):
    """failures: the trace of each rank that failed."""

    def __init__(self, failures: list[str]) -> None:
        super().__init__(failures[0])
        self.failures = failures


def _of_rank_0(answers: list[Any]) -> StepResult:
    assert answers[1:] == [None] * (len(answers) - 1)
    assert isinstance(answers[0], StepResult)
    return answers[0]


class RankPool:
    """`make` a model over `size` ranks, then `execute` plans on it."""

    def __init__(self, size: int = 2) -> None:
        context = rank_processes()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve_rank, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def make(
        self, folder: object, num_stages: int = 1, num_blocks: int = 256,
        num_host_blocks: int = 0, capture: bool = False, **spec: Any,
    ) -> list[Any]:  # fmt: skip
        """Load; each rank's StageInfos. Raises RuntimeError with the rank's error.

        capture: run steps as captured graphs do (see EagerCapture)."""
        base = {
            "model_path": str(folder), "backend": "torch", "num_threads": 1, "block_size": 4,
            "max_model_len": 256, "num_stages": num_stages, "tensor_ranks": len(self._pipes),
            **spec,
        }  # fmt: skip
        specs = [
            {**base, "stage": s, "group_address": f"127.0.0.1:{free_port()}"}
            for s in range(num_stages)
        ]
        return self._all(("make", (specs, num_blocks, num_host_blocks, capture)))

    def load_adapter(self, slot: int, folder: Path) -> None:
        self._all(("load_adapter", (slot, folder)))

    def execute(self, plan: StepPlan) -> StepResult:
        return _of_rank_0(self._all(("execute", plan)))

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What a function of a module says in each rank, given its runners and these arguments."""
        return self._all(("call", (function, arguments)))

    def send_plan(self, plan: StepPlan | None, late: Container[int] = ()) -> None:
        """Send the next plan of a single stage, which ranks may launch ahead of their step; the
        late ones will have ended it by then. None: there is no plan yet."""
        for rank, pipe in enumerate(self._pipes):
            if plan is None or rank in late:
                pipe.send(("no plan yet", None))
            if plan is not None:
                pipe.send(("execute ahead", plan))

    def next_result(self) -> StepResult:
        """The answer to the oldest plan sent."""
        return _of_rank_0(self._answers())

    def _all(self, message: object) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(message)
        return self._answers()

    def _answers(self) -> list[Any]:
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(_ANSWER_WAIT_S):
                self.kill()
                raise RuntimeError(f"rank {rank} does not answer")
            answers.append(pipe.recv())
        failures = [value for status, value in answers if status == "error"]
        if failures:
            raise RanksFailed(failures)
        return [value for _, value in answers]

    @property
    def lives(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()

    def close(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # of a rank that was killed
                pipe.send(None)
        for process in self._processes:
            process.join(10)
