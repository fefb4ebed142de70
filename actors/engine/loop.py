"""The loop around the pure core: events in, instructions carried out.

It feeds events (submissions and aborts from the replica or from fronts, answers from the pipeline,
deaths and missed deadlines) to `Core.handle`, and carries out the instructions: plans go to the
pipeline, outputs to the replica or front that asked, one message per iteration. Planning the next
step overlaps executing this one because the core keeps up to `depth` steps outstanding.

Each step leaves the CPU caches full of model weights, so the loop's time depends on how many
functions and objects it touches: work that can wait is done once for several steps.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from actors.engine.adapters import AdapterSlots
from actors.engine.config import EngineConfig
from actors.engine.iteration_records import IterationRecords
from actors.engine.kv_moves import KVMoves
from actors.engine.peers import OWNER, Message, OnGone, OnMessage, Peers, connection_of
from actors.engine.publication import Publication
from actors.engine.questions import ANSWERED_LATER, Questions
from actors.engine.recovery import Recovery, grammars_of, suspects_of, suspects_of_loss
from actors.engine.saved_prompts import SavedPrompts
from actors.engine.step_deadline import StepDeadline
from actors.executor.stage_set import StageSet, StagesFailed
from actors.fleet.publish import Publisher
from actors.scheduling.core import Core
from actors.scheduling.events import (
    Abort,
    DeliveryTook,
    Emit,
    Event,
    Execute,
    FetchEarly,
    Instruction,
    KVMove,
    OutputRow,
    PipelineLost,
    Refuse,
    StepDone,
    StepFailed,
    Submit,
    Tick,
    TurnedAway,
    WakeAt,
)
from actors.scheduling.plan import StepResult
from actors.scheduling.request import Grammar, Request
from actors.transport.background_tasks import BackgroundTasks
from actors.transport.messages import (
    AbortRequests,
    Ask,
    Readiness,
    StandbyTaken,
    StepError,
    SubmitRequests,
)

logger = logging.getLogger("legato.scheduler")


class EngineLoop:
    """One per scheduler, created when its stages and its core exist.

    handle: that of the core, or of an event recorder around it.
    publisher: makes the engine's snapshots for a fleet's fronts; None outside a fleet.
    on_owner_gone: called once the replica's socket has closed, which ends the engine.
    make_peers: of the callbacks for a message and for a closed connection.
    """

    def __init__(
        self,
        config: EngineConfig,
        core: Core,
        handle: Callable[[Event, float], list[Instruction]],
        stages: StageSet,
        publisher: Publisher | None,
        on_owner_gone: Callable[[], None],
        make_peers: Callable[[OnMessage, OnGone], Peers] = Peers,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._core_handle = handle
        self._stages = stages
        self._on_owner_gone = on_owner_gone
        self._clock = clock
        self.peers = make_peers(self._received, self._gone)
        self.publication = None if publisher is None else Publication(core, publisher, self.peers)
        self._records = IterationRecords(core)
        self._wake: asyncio.TimerHandle | None = None
        self._tasks = BackgroundTasks()
        self._recovery = Recovery(
            stages, config.max_rebuilds, self._tasks, on_lost=self._stages_lost,
            on_built=self._stages_built, grammars=lambda: grammars_of(core),
            on_rebuilt=self._stages_rebuilt,
            num_requests=lambda: len(core.live_requests),
            engine_id=None if publisher is None else publisher.engine_id,
        )  # fmt: skip
        limits = (config.step_deadline_s, config.deadline_factor)
        self._deadline = StepDeadline(core, *limits, self._recovery.lose, clock)
        self._moves = KVMoves(stages, self._tasks, config, self._handle, self._move_lost, core)
        self._compiling: dict[int, int] = {}  # adapters of requests that wait for their grammar
        self._slots = AdapterSlots(core, self._handle, stages, self.publication, self._compiling)
        self._questions = Questions(
            core, self._handle, stages, self._recovery, self.publication, self._moves, self._slots
        )  # fmt: skip
        hands_over = core.tier is not None and core.config.hands_over
        self._saved = SavedPrompts(core, self.peers.send_saved) if hands_over else None
        self._sent_suspects = False
        self._first_dropped: int | None = None  # step of those dropped during this rebuild
        stages.listen(self._answered, self._recovery.pipeline_lost, self._standby_taken)
        self._moves.start()

    # ---- from the replica and fronts -----------------------------------------------------------

    def _received(self, number: int, message: Message) -> None:
        if isinstance(message, SubmitRequests):
            for request in message.requests:
                grammar = request.sampling.grammar
                if grammar is None or self._slots.refusal(request) is not None:
                    self._submit(request)
                else:
                    self._compiling[request.request_id] = request.adapter
                    self._tasks.start(self._submit_with_grammar(request, grammar))
        elif isinstance(message, AbortRequests):
            for request_id in message.request_ids:
                self._compiling.pop(request_id, None)
                self._handle(Abort(request_id))
        elif isinstance(message, FetchEarly | DeliveryTook | TurnedAway):
            self._handle(message)
        elif message.question in ANSWERED_LATER:
            self._tasks.start(self._answer_later(number, message))
        else:
            self.peers.send(number, self._questions.answer(message))

    def _submit(self, request: Request) -> None:
        if request.adapter and (refusal := self._slots.refusal(request)) is not None:
            self.peers.send_refusal(refusal)
        else:
            self._handle(Submit(request))

    async def _answer_later(self, number: int, ask: Ask) -> None:
        self.peers.send(number, await self._questions.answer_later(ask))

    async def _submit_with_grammar(self, request: Request, grammar: Grammar) -> None:
        """The last stage compiles the grammar off its step loop before the request may start."""
        try:
            problem = await self._stages.compile_grammar(grammar)
        except StagesFailed:
            problem = None  # the first step compiles it, or fails if the stage hangs
        if request.request_id not in self._compiling:
            return  # aborted meanwhile
        del self._compiling[request.request_id]
        if problem is None:
            if self.peers.knows(request.request_id):
                self._submit(request)
        else:
            self.peers.send_refusal(Refuse(request.request_id, problem, "response_format"))

    def _gone(self, number: int) -> None:
        if number == OWNER:
            self._moves.forget()
            self._on_owner_gone()
            return
        for request_id in list(self._core.live_requests):
            if connection_of(request_id) == number:
                self._handle(Abort(request_id))

    # ---- from the pipeline -----------------------------------------------------------------------

    def _answered(self, answer: StepResult | StepError) -> None:
        core, recovery = self._core, self._recovery
        if recovery.is_rebuilding:
            return
        step = core.in_flight[0]
        if isinstance(answer, StepError):
            logger.error("step %d failed: %s", answer.step_id, answer.message)
            message = answer.message.splitlines()[0]
            self._handle(StepFailed(step.plan.step_id, message))
            recovery.step_failed(message, core.num_failures_in_a_row)
            return
        since_s = max(step.planned_at_s, core.last_answer_s)  # stages may have other clocks
        self._handle(StepDone(answer))
        # The outputs have been sent; the rest is not urgent.
        now_s = core.last_answer_s
        recovery.num_rebuilds_in_a_row = 0
        if overflows := core.outcomes.num_overflows_in_a_row:
            recovery.overflowed(overflows)
        token_s = (now_s - since_s) / max(1, step.num_tokens)
        self._deadline.slowest_token_s = max(0.99 * self._deadline.slowest_token_s, token_s)
        self._records.note(step, now_s, answer, recovery.num_recoveries)
        if not core.in_flight:  # no outputs will follow that could carry them
            self._send_outputs([])

    def _move_lost(self, reason: str, is_hung: bool) -> None:
        """A stage that dies, or stands still, in a step also answers no move."""
        is_innocent = is_hung and not self._deadline.is_half_over
        self._recovery.lose(reason, steps_are_suspect=not is_innocent)

    def _stages_lost(self) -> None:
        self._moves.forget()
        if self.publication is not None:
            # Fronts move their streams at once, and `PipelineLost` comes after the rebuild.
            are_suspect = self._recovery.steps_are_suspect
            suspects, ends = suspects_of_loss(self._core, are_suspect, self._first_dropped)
            self.peers.broadcast(suspects)
            self._sent_suspects = True
            if ends:
                self._send_outputs(ends)
        self._send_readiness(False)

    def _stages_built(self) -> None:
        """Requests of adapters that are lost end before a step of the new stages has them."""
        for refusal in self._slots.stages_built():
            self.peers.send_refusal(refusal)
            self._handle(Abort(refusal.request_id))

    def _stages_rebuilt(self) -> None:
        self._send_readiness(True)
        first_dropped, self._first_dropped = self._first_dropped, None
        are_suspect = self._recovery.steps_are_suspect
        self._handle(PipelineLost(self._stages.tier, are_suspect, first_dropped))

    def _standby_taken(self, name: str) -> None:
        self.peers.send(OWNER, StandbyTaken(name))

    def _send_readiness(self, is_ready: bool) -> None:
        self.peers.broadcast(Readiness(is_ready))
        if self.publication is not None:
            self.publication.computes(is_ready)

    # ---- the core ------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        now_s = self._clock()
        rows: list[OutputRow] = []
        for instruction in self._core_handle(event, now_s):
            if isinstance(instruction, Execute):
                self._execute(instruction)
            elif isinstance(instruction, Emit):
                rows += instruction.rows
            elif isinstance(instruction, Refuse):
                self.peers.send_refusal(instruction)
            elif isinstance(instruction, WakeAt):
                self._wake_at(instruction.time_s - now_s)
            elif isinstance(instruction, KVMove) and not self._recovery.is_rebuilding:
                self._moves.begin(instruction)  # (else PipelineLost follows and drops it)
        if rows or self._records.due:
            self._send_outputs(rows)
        if self._saved is not None:
            self._saved.tell()  # before a hand-over is allowed
        if self._moves.waiting:
            self._moves.tell()
        is_new = self._core.trials or self._sent_suspects
        if is_new and not self._recovery.is_rebuilding:  # the core knows of no loss before its end
            suspects = suspects_of(self._core)
            self._sent_suspects = bool(suspects.losses)
            self.peers.broadcast(suspects)

    def _send_outputs(self, rows: list[OutputRow]) -> None:
        records, self._records.due = self._records.due, []
        self.peers.send_outputs(rows, records)

    def _execute(self, instruction: Execute) -> None:
        if self._recovery.is_rebuilding:
            if self._first_dropped is None:
                self._first_dropped = instruction.plan.step_id
            return  # PipelineLost follows the rebuild and plans this work again
        if self._deadline.timer is None:
            self._deadline.watch()
        if instruction.plan.started:
            started = [s.request_id for s in instruction.plan.started]
            self.peers.send_started(started)
            if self._saved is not None:
                self._saved.started(started)
        if self._stages.pipeline is not None:
            self._stages.pipeline.submit(instruction.plan)

    def _wake_at(self, delay_s: float) -> None:
        if self._wake is not None:
            self._wake.cancel()
        self._wake = asyncio.get_running_loop().call_later(max(0.0, delay_s), self._handle, Tick())
