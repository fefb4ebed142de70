"""Stages chained by a Ray compiled graph: the only file that uses those.

Tickets. A process that waits in a compiled graph's channel spins, so none should wait there long.
Executions ("tickets") are therefore submitted in advance: a stage that ends a step finds the
next ticket in its channel at once and sleeps in its `gate` method, in a socket read, until the
plan (first stage) or its predecessor's wake-up (later stages) arrives. The last stage wakes the
scheduler before it writes its answer, so the scheduler spins only briefly, and an idle
pipeline not at all.

A pipeline of one stage passes nothing on, so it needs only one ticket: plans come by sockets, and
so do the answers, one from each rank. Ray has no part in its steps.

A channel between nodes holds one message, so there at most two micro-batches are in flight. Tested
with three Ray nodes on one machine (`tests/live/several_nodes.py`), not over a network.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import ray
from ray.dag import DAGContext, InputNode, MultiOutputNode
from ray.experimental.channel.common import SynchronousReader

from actors.scheduling.plan import StepPlan, StepResult
from actors.transport import semaphores
from actors.transport.addresses import new_secret, private_directory
from actors.transport.messages import (
    STAGE_TIMES,
    TICKET,
    StageAnswer,
    StepError,
    pack,
    read_answer,
)
from actors.transport.pipeline import StageHandles, Watched
from actors.transport.running_time import LOOKS, RunningTime
from actors.transport.wire import FrameProtocol, connect, listen

if TYPE_CHECKING:
    from actors.transport.communicator import StageCommunicator

_READ_TIMEOUT_S = 5.0
# After the failure of one rank: the others may wait for it within a sum, for ever.
_OTHERS_WITHIN_S = 2.0
# Ray logs pages of tracebacks when stages are killed on purpose; a real death reaches on_lost.
logging.getLogger("ray.dag.compiled_dag_node").setLevel(logging.CRITICAL)


def set_channel_bytes(num_bytes: int) -> None:
    """Buffer size of the channels that this process makes from now on.

    Set in this process instead of by RAY_CGRAPH_buffer_size_bytes, because Ray starts a process
    with its own environment through another one, which takes most of a second more.
    """
    DAGContext.get_current().buffer_size_bytes = num_bytes


class _PatientReader(SynchronousReader):
    """May be asked again after a timeout: Ray's own forgets what it has read of the other ranks."""

    def __init__(self, channels: list[Any]) -> None:
        super().__init__(channels)
        self._found: list[Any] = []  # of the ticket that is being read

    def _read_list(self, timeout: float | None = None) -> list[Any]:
        for channel in self._input_channels[len(self._found) :]:
            self._found.append(channel.read(timeout))
        self._found, found = [], self._found
        return found


class GraphPipeline(Watched):
    """See the module's docstring."""

    def __init__(self, stages: StageHandles, depth: int, accelerator: str | None = None) -> None:
        """accelerator: the device type whose tensors go from stage to stage without touching
        host memory ("cuda"); None sends them through shared memory."""
        super().__init__(stages)
        self._depth = depth
        self._accelerator = accelerator
        self._alone = len(stages) == 1
        # Answers of a single stage's ranks to steps that not all have answered, by ticket.
        self._answers: dict[int, list[StageAnswer]] = {}
        self._num_wakes = len(stages[0]) if self._alone else 1
        self._first: list[FrameProtocol] = []
        self._wake_server: asyncio.AbstractServer | None = None
        self._graph: Any = None
        self._tickets: deque[Any] = deque()  # references of executions submitted, oldest first
        self._next_execution = 0
        self._next_ticket = 0  # the ticket the next plan will use
        self._unanswered: deque[tuple[int, int]] = deque()  # (ticket, step id)
        self._semaphores: set[int] = set()  # of the channels: inodes
        self._times_server: asyncio.AbstractServer | None = None
        # Device times of earlier stages, by ticket and stage; empty if the hosts measure them.
        self._device_times: dict[int, dict[int, tuple[float, float]]] = {}

    async def open(self) -> None:
        one_node = await self._on_one_node()
        if one_node:
            directory = private_directory()
            try:
                await self._connect(directory)
            finally:
                shutil.rmtree(directory, ignore_errors=True)
        else:
            await self._connect(None)
        self._compile(await self._communicator(), one_node)
        self.watch()
        if one_node:
            pids = await asyncio.gather(*[a.pid.remote() for ranks in self._stages for a in ranks])
            self._semaphores = semaphores.mapped_by(pids)
        semaphores.remove_orphans(semaphores.own_raylet())  # the stages before these have ended
        # Between nodes a channel holds one message, so a third ticket would block.
        ahead = 1 if self._alone else self._depth + 1 if one_node else 2
        for _ in range(ahead):
            self._add_ticket()

    async def _on_one_node(self) -> bool:
        nodes = await asyncio.gather(*[a.node_id.remote() for s in self._stages for a in s])
        return {*nodes, ray.get_runtime_context().get_node_id()} == {nodes[0]}

    async def _connect(self, directory: Path | None) -> None:
        """directory: of Unix sockets; None if the stages are on several nodes."""

        def path(name: str) -> str | None:
            return None if directory is None else str(directory / name)

        secret = b"" if directory is not None else new_secret()
        self._wake_server, wake = await listen(
            path("wake") or f"{ray.util.get_node_ip_address()}:0",
            lambda: FrameProtocol(self._woken, self._wake_lost, secret),
        )
        grid = [(s, r, a) for s, ranks in enumerate(self._stages) for r, a in enumerate(ranks)]
        opened = await asyncio.gather(
            *[a.listen.remote(path(f"{s}.{r}"), secret) for s, r, a in grid]
        )
        mailbox = {(s, r): address for (s, r, _), address in zip(grid, opened, strict=True)}
        last = len(self._stages) - 1
        await asyncio.gather(
            *[a.connect_next.remote(mailbox[s + 1, r], secret) for s, r, a in grid if s < last],
            *[a.connect_next.remote(wake, secret) for a in self._stages[last][: self._num_wakes]],
        )
        if self._accelerator is not None and last:
            self._times_server, times = await listen(
                path("times") or f"{ray.util.get_node_ip_address()}:0",
                lambda: FrameProtocol(self._timed, lambda: None, secret),
            )
            await asyncio.gather(
                *[
                    ranks[0].time_on_device.remote(times if s < last else None, secret)
                    for s, ranks in enumerate(self._stages)
                ]
            )
        for rank in range(len(self._stages[0])):
            first = await connect(mailbox[0, rank], lambda _: None, lambda: None, secret)
            self._first.append(first)

    async def _communicator(self) -> StageCommunicator | None:
        if self._accelerator is None or len(self._stages) == 1:
            return None
        from actors.transport.communicator import StageCommunicator  # and with it torch

        address = await self._stages[0][0].free_address.remote()
        flat = [actor for ranks in self._stages for actor in ranks]
        return StageCommunicator(flat, address, self._accelerator)

    def _compile(self, communicator: StageCommunicator | None, one_node: bool) -> None:
        with InputNode() as ticket:
            chain = [actor.forward_first.bind(actor.gate.bind(ticket)) for actor in self._stages[0]]
            for ranks in self._stages[1:]:
                if communicator is not None:
                    chain = [node.with_tensor_transport(communicator) for node in chain]
                chain = [
                    actor.forward.bind(actor.gate.bind(ticket), message)
                    for actor, message in zip(ranks, chain, strict=True)
                ]
            output = MultiOutputNode(chain)
        self._graph = output.experimental_compile(
            _submit_timeout=600.0, _max_inflight_executions=self._depth + 2
        )
        self._graph._dag_output_fetcher = _PatientReader(self._graph.dag_output_channels)
        # Ray registers a reader at its first read or close, and ends the process if the channel's
        # writer has died by then. Answers may never be read, so register now.
        for channel in self._graph.dag_output_channels:
            channel.ensure_registered_as_reader()
        # Ray starts an actor as a proxy of the reader of the graph's answers. Only writers on other
        # nodes use it, so on one node it is ended. (Killing it during its start would leave its
        # process behind, so it is asked to exit.)
        if one_node:
            self._graph._proxy_actor.__ray_terminate__.remote()

    def _add_ticket(self) -> None:
        self._tickets.append(self._graph.execute(self._next_execution))
        self._next_execution += 1

    def submit(self, plan: StepPlan) -> None:
        ticket = self._next_ticket
        self._next_ticket += 1
        self._unanswered.append((ticket, plan.step_id))
        frame = TICKET.pack(ticket) + pack(plan)
        for rank in self._first:
            rank.send(frame)

    def _woken(self, frame: bytes) -> None:
        """The last stage has ended a step; its answer is here, or will soon be in the channel."""
        if self._on_answer is None or not self._unanswered:
            return
        answer = self._gather(frame) if self._alone else self._read_channel(frame)
        if answer is None:
            return
        ticket, step_id = self._unanswered.popleft()
        answered, packed, failure = answer
        if answered != ticket:
            self.lose(f"ticket {ticket} was answered with {answered}")
            return
        self._on_answer(self._with_device_times(ticket, read_answer(step_id, packed, failure)))

    def _gather(self, frame: bytes) -> StageAnswer | None:
        """The answers of all ranks of a single stage, as one; None as long as one is missing."""
        answer: StageAnswer = msgpack.unpackb(frame)
        ticket = answer[0]
        answers = self._answers.setdefault(ticket, [])
        answers.append(answer)
        if len(answers) < self._num_wakes:
            if answer[2] is not None:
                loop = asyncio.get_running_loop()
                loop.call_later(_OTHERS_WITHIN_S, self._lose_unanswered, ticket)
            return None
        del self._answers[ticket]
        packed = next((a[1] for a in answers if a[1]), b"")  # rank 0's
        return ticket, packed, _failure(answers)

    def _lose_unanswered(self, ticket: int) -> None:
        if answers := self._answers.get(ticket):
            self.lose(f"a rank failed, for which the others wait: {_failure(answers)}")

    def _timed(self, frame: bytes) -> None:
        ticket, stage, begin_s, end_s = STAGE_TIMES.unpack(frame)
        if self._unanswered and ticket >= self._unanswered[0][0]:  # else it is already answered
            self._device_times.setdefault(ticket, {})[stage] = (begin_s, end_s)

    def _with_device_times(
        self, ticket: int, answer: StepResult | StepError
    ) -> StepResult | StepError:
        taken = self._device_times.pop(ticket, None)
        if taken is None or isinstance(answer, StepError):
            return answer
        times = enumerate(answer.stage_times_s)
        return replace(answer, stage_times_s=tuple(taken.get(s, told) for s, told in times))

    def _read_channel(self, frame: bytes) -> StageAnswer | None:
        """The answers of all ranks of the last stage, as one; None if the graph is lost."""
        try:
            self._await_ticket()
            answers = [ref.get() for ref in self._tickets.popleft()]
        except (ray.exceptions.RayError, TimeoutError) as error:
            self.lose(f"no answer in the graph: {type(error).__name__}: {error}")
            return None
        self._add_ticket()
        answered, packed, _ = answers[0]
        if TICKET.unpack(frame)[0] != answered:
            self.lose(f"woken for ticket {TICKET.unpack(frame)[0]}, answered with {answered}")
            return None
        return answered, packed, _failure(answers)

    def _await_ticket(self) -> Any:
        """Until the oldest ticket is answered. Only time in which this process ran is counted."""
        execution = self._next_execution - len(self._tickets)
        ran, begin_s, period_s = RunningTime(), time.monotonic(), _READ_TIMEOUT_S / LOOKS
        while ran.since(begin_s, time.monotonic(), period_s) < _READ_TIMEOUT_S:
            with contextlib.suppress(ray.exceptions.RayChannelTimeoutError):
                return self._graph._execute_until(execution, timeout=period_s)
        raise TimeoutError(f"none within {_READ_TIMEOUT_S:g} s of the last stage's wake-up")

    def _wake_lost(self) -> None:
        self.lose("the last stage closed its socket")

    def close(self) -> None:
        self.kill()
        for rank in self._first:
            rank.close()
        for server in filter(None, (self._wake_server, self._times_server)):
            server.close()
        # This process has one pipeline at a time, to which all its mapped channels belong.
        semaphores.remove(self._semaphores | semaphores.mapped_by([os.getpid()]))
        graph, self._graph = self._graph, None
        if graph is not None:
            threading.Thread(target=_tear_down, args=(graph, self._tickets), daemon=True).start()
        self._tickets = deque()


def _failure(answers: Sequence[StageAnswer]) -> str | None:
    return next((failure for *_, failure in answers if failure is not None), None)


def _tear_down(graph: Any, tickets: deque[Any]) -> None:
    """Runs in a thread, because teardown can block for ever on a hung stage, and dropping an unread
    ticket before it would wait in the channel. The stages are dead already, so a thread that never
    ends holds no resources."""
    with contextlib.suppress(ray.exceptions.RayError):
        graph.teardown(kill_actors=True)
    tickets.clear()
