"""A chain of stages behind one small interface: plans go in, answers come out in order.

The only file that knows Ray's compiled graphs. `GraphPipeline` is the product's spine;
`CallPipeline` does the same by plain actor calls, so that a change of Ray costs this file alone.

Tickets. Whoever waits in a compiled graph's channel spins, so nobody may wait there for long.
Executions ("tickets") are therefore submitted ahead of need: a stage that ends a step finds the
next ticket in its channel at once and sleeps in its `gate` method, in a socket read, until the
plan (first stage) or its predecessor's ring (later stages) arrives. The last stage rings the
scheduler before it writes its answer, so the scheduler enters the channel only when the answer
is about to be there. Idle cost: none.

A pipeline of one process passes nothing on, so one ticket is enough for its life: plans come by the
socket as always, and answers ride on the ring.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import ray
from ray.dag import InputNode, MultiOutputNode

from actors.communicator import StageCommunicator
from actors.messages import StepError, pack_plan, unpack_result
from actors.scheduling.plan import StepPlan, StepResult
from actors.stage.actor import TICKET, Answer, unpack_answer
from actors.wire import FrameProtocol, connect, listen, private_directory

StageHandles = Sequence[Sequence[Any]]  # [stage][rank] -> actor handle of StageActor
_READ_TIMEOUT_S = 5.0
# Ray logs pages of tracebacks when stages are killed on purpose; a real death reaches on_lost.
logging.getLogger("ray.dag.compiled_dag_node").setLevel(logging.CRITICAL)


class Pipeline(Protocol):
    """Callbacks run on the owner's event loop: on_answer once per submitted plan, in order;
    on_lost at most once, after which nothing more is answered."""

    async def open(
        self,
        on_answer: Callable[[StepResult | StepError], None],
        on_lost: Callable[[str], None],
    ) -> None: ...

    def submit(self, plan: StepPlan) -> None:
        """Hand over a plan; at most `depth` may be unanswered."""
        ...

    def close(self) -> None:
        """Stop answering and kill the stages."""
        ...


def _decode(step_id: int, packed: bytes, error: str | None) -> StepResult | StepError:
    if error is not None:
        return StepError(step_id, error)
    result = unpack_result(packed)
    if result.step_id != step_id:
        return StepError(step_id, f"step {step_id} was answered with step {result.step_id}")
    return result


class _Watched:
    """What both transports share: watching the stages live and killing them."""

    def __init__(self, stages: StageHandles) -> None:
        self._stages = stages
        self._on_lost: Callable[[str], None] | None = None
        self._watchers: list[asyncio.Task[None]] = []

    def _watch(self, on_lost: Callable[[str], None]) -> None:
        self._on_lost = on_lost
        for number, ranks in enumerate(self._stages):
            for rank, actor in enumerate(ranks):
                name = f"stage {number} rank {rank}"
                self._watchers.append(asyncio.create_task(self._watch_one(name, actor)))

    async def _watch_one(self, name: str, actor: Any) -> None:
        try:
            await actor.watch.remote()
        except ray.exceptions.RayError as error:
            self._lose(f"{name} died: {type(error).__name__}")

    def _lose(self, reason: str) -> None:
        on_lost, self._on_lost = self._on_lost, None
        if on_lost is not None:
            on_lost(reason)

    def _kill(self) -> None:
        self._on_lost = None
        for task in self._watchers:
            task.cancel()
        for ranks in self._stages:
            for actor in ranks:
                ray.kill(actor)


class GraphPipeline(_Watched):
    """Stages chained by a Ray compiled graph (see the module's text)."""

    def __init__(self, stages: StageHandles, depth: int, accelerator: str | None = None) -> None:
        """accelerator: the device type whose tensors go from stage to stage without touching
        host memory ("cuda"); None sends them through shared memory."""
        super().__init__(stages)
        self._depth = depth
        self._accelerator = accelerator
        self._alone = sum(len(ranks) for ranks in stages) == 1
        self._on_answer: Callable[[StepResult | StepError], None] | None = None
        self._first: list[FrameProtocol] = []
        self._bell: asyncio.AbstractServer | None = None
        self._graph: Any = None
        self._tickets: deque[Any] = deque()  # references of executions submitted, oldest first
        self._next_execution = 0
        self._next_ticket = 0  # the ticket the next plan will use
        self._unanswered: deque[tuple[int, int]] = deque()  # (ticket, step id)

    async def open(
        self,
        on_answer: Callable[[StepResult | StepError], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._on_answer = on_answer
        directory = private_directory()
        try:
            await self._connect(directory)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        self._compile(await self._communicator())
        self._watch(on_lost)
        for _ in range(1 if self._alone else self._depth + 1):
            self._add_ticket()

    async def _connect(self, directory: Any) -> None:
        def path(stage: int, rank: int) -> str:
            return str(directory / f"{stage}.{rank}")

        grid = [(s, r, a) for s, ranks in enumerate(self._stages) for r, a in enumerate(ranks)]
        await asyncio.gather(*[a.listen.remote(path(s, r)) for s, r, a in grid])
        last = len(self._stages) - 1
        bell = directory / "bell"
        self._bell = await listen(bell, lambda: FrameProtocol(self._rung, self._bell_lost))
        await asyncio.gather(
            *[a.connect_next.remote(path(s + 1, r)) for s, r, a in grid if s < last],
            self._stages[last][0].connect_next.remote(str(bell)),
        )
        for rank in range(len(self._stages[0])):
            self._first.append(await connect(directory / f"0.{rank}", lambda _: None, lambda: None))

    async def _communicator(self) -> StageCommunicator | None:
        if self._accelerator is None or len(self._stages) == 1:
            return None
        address = await self._stages[0][0].free_address.remote()
        flat = [actor for ranks in self._stages for actor in ranks]
        return StageCommunicator(flat, address, self._accelerator)

    def _compile(self, communicator: StageCommunicator | None) -> None:
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
        # Ray starts an actor to stand in for the reader of the graph's answers. Only writers on
        # other nodes ever ask it for anything: on one node it is a process that wakes for nothing.
        # (Killed while it starts, it would leave its process behind: so it is asked to leave.)
        if len(set(self._graph.actor_to_node_id.values())) == 1:
            self._graph._proxy_actor.__ray_terminate__.remote()

    def _add_ticket(self) -> None:
        self._tickets.append(self._graph.execute(self._next_execution))
        self._next_execution += 1

    def submit(self, plan: StepPlan) -> None:
        ticket = self._next_ticket
        self._next_ticket += 1
        self._unanswered.append((ticket, plan.step_id))
        frame = TICKET.pack(ticket) + pack_plan(plan)
        for rank in self._first:
            rank.send(frame)

    def _rung(self, frame: bytes) -> None:
        """The last stage has ended a step: its answer is here, or in the channel, or nearly so."""
        if self._on_answer is None or not self._unanswered:
            return
        ticket, step_id = self._unanswered.popleft()
        answer = unpack_answer(frame) if self._alone else self._read_channel(frame)
        if answer is None:
            return
        answered, packed, failure = answer
        if answered != ticket:
            self._lose(f"ticket {ticket} was answered with {answered}")
            return
        self._on_answer(_decode(step_id, packed, failure))

    def _read_channel(self, frame: bytes) -> Answer | None:
        """What all ranks of the last stage say, as one answer; None if the graph is lost."""
        try:
            answers = [ref.get(timeout=_READ_TIMEOUT_S) for ref in self._tickets.popleft()]
        except (ray.exceptions.RayError, ray.exceptions.RayChannelError, TimeoutError) as error:
            self._lose(f"no answer in the graph: {type(error).__name__}: {error}")
            return None
        self._add_ticket()
        answered, packed, _ = answers[0]
        if TICKET.unpack(frame)[0] != answered:
            self._lose(f"rung for ticket {TICKET.unpack(frame)[0]}, answered with {answered}")
            return None
        return answered, packed, next((a[2] for a in answers if a[2] is not None), None)

    def _bell_lost(self) -> None:
        self._lose("the last stage closed its bell")

    def close(self) -> None:
        self._on_answer = None
        self._kill()
        for rank in self._first:
            rank.close()
        if self._bell is not None:
            self._bell.close()
        graph, self._graph = self._graph, None
        if graph is not None:
            threading.Thread(target=_tear_down, args=(graph, self._tickets), daemon=True).start()
        self._tickets = deque()


def _tear_down(graph: Any, tickets: deque[Any]) -> None:
    """Runs in a thread: teardown can block for ever on a stuck stage, and dropping an unread
    ticket before it would wait in the channel. The stages are dead already, so a thread that
    outlives the pipeline holds nothing."""
    with contextlib.suppress(ray.exceptions.RayError):
        graph.teardown(kill_actors=True)
    tickets.clear()


class CallPipeline(_Watched):
    """Stages chained by plain actor calls: slower, and independent of compiled graphs."""

    def __init__(self, stages: StageHandles, depth: int) -> None:
        super().__init__(stages)
        self._pending: asyncio.Queue[tuple[int, list[Any]]] = asyncio.Queue()
        self._next_ticket = 0
        self._reader: asyncio.Task[None] | None = None

    async def open(
        self,
        on_answer: Callable[[StepResult | StepError], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._watch(on_lost)
        self._reader = asyncio.create_task(self._read(on_answer))

    def submit(self, plan: StepPlan) -> None:
        message = (self._next_ticket, pack_plan(plan), None, (), None)
        self._next_ticket += 1
        messages: list[Any] = [message] * len(self._stages[0])
        for ranks in self._stages:
            messages = [actor.step.remote(m) for actor, m in zip(ranks, messages, strict=True)]
        self._pending.put_nowait((plan.step_id, messages))

    async def _read(self, on_answer: Callable[[StepResult | StepError], None]) -> None:
        while True:
            step_id, references = await self._pending.get()
            try:
                answers = [await reference for reference in references]
            except ray.exceptions.RayError as error:
                self._lose(f"a stage call failed: {type(error).__name__}")
                return
            failure = next((a[2] for a in answers if a[2] is not None), None)
            on_answer(_decode(step_id, answers[0][1], failure))

    def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
        self._kill()


def make_pipeline(
    transport: str, stages: StageHandles, depth: int, accelerator: str | None = None
) -> Pipeline:
    """transport: "graph" or "call". accelerator: see GraphPipeline; for "graph" only."""
    if transport == "graph":
        return GraphPipeline(stages, depth, accelerator)
    return CallPipeline(stages, depth)
