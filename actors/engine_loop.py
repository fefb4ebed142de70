"""The loop around the pure core: events in, instructions carried out.

It feeds events (submissions and aborts from the replica or from fronts, answers from the pipeline,
deaths and missed deadlines) to `Core.handle`, and carries out the instructions: plans go to the
pipeline, outputs to the replica or front that asked, one message per iteration. Planning the next
step overlaps executing this one because the core keeps up to `depth` steps outstanding.

A step finds the caches full of the model's weights, so what counts here is not how much is
computed but how many functions and objects are touched: what can wait is done some steps at a time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from actors.bits import bits_of
from actors.calibration.outlook import within_reach
from actors.calibration.probe import PipelineProbe, ProbeFailed
from actors.calibration.start import calibrate_at_start, keep_learnt
from actors.engine_config import EngineConfig
from actors.event_recorder import EventLog, open_log
from actors.fleet.publish import Publisher
from actors.gc_utils import freeze_gc_heap
from actors.kv_moves import KVMoves
from actors.peers import OWNER, Door, Message, Peers, connection_of
from actors.publication import Publication
from actors.questions import Questions
from actors.recovery import BackgroundTasks, Recovery, grammars_of, suspects_of
from actors.scheduling.build import build_core
from actors.scheduling.config import SchedulerConfig
from actors.scheduling.core import Core
from actors.scheduling.event_log import Recorder
from actors.scheduling.events import (
    Abort,
    Emit,
    Event,
    Execute,
    Instruction,
    Move,
    PipelineLost,
    Refuse,
    StepDone,
    StepFailed,
    Submit,
    Tick,
    WakeAt,
)
from actors.scheduling.plan import StepResult
from actors.scheduling.request import Grammar, Request
from actors.stage.spec import StageInfo
from actors.stage_set import StageSet, StagesFailed
from actors.steps_in_flight import IterationRecords, StepDeadline
from actors.transport.messages import (
    AbortRequests,
    Ask,
    Readiness,
    RefuseRequests,
    StepError,
    SubmitRequests,
    Welcome,
    output_rows,
)

logger = logging.getLogger("legato.scheduler")


def _not_started(event: Event, now_s: float) -> list[Instruction]:
    raise RuntimeError("scheduler used before start()")


class EngineLoop:
    """One per scheduler actor. All state belongs to the running event loop."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.stages = StageSet(config, self._answered, self._lost)
        self._core: Core | None = None
        self._call: Callable[[Event, float], list[Instruction]] = _not_started
        self._events: EventLog | None = None
        self._peers = Peers(self._received, self._gone)
        self._publication: Publication | None = None  # in a fleet
        self._questions: Questions  # once started
        self._finished = asyncio.Event()
        self._outstanding = StepDeadline(
            config.step_deadline_s, config.deadline_factor, self._overdue
        )
        self._wake: asyncio.TimerHandle | None = None
        self._records: IterationRecords | None = None
        self._calibrated: StageInfo | None = None  # the engine measured its own cost model
        self._probe: PipelineProbe | None = None  # while steps are measured, before the core is
        self._tasks = BackgroundTasks()
        self._recovery = Recovery(
            *(self.stages, config.max_rebuilds, self._tasks, self._stages_lost),
            lambda: grammars_of(self._core),
            self._stages_rebuilt,
        )
        self._moves = KVMoves(self.stages, self._tasks, config, self._handle, self._lost)
        self._told_suspects = False

    # ---- life --------------------------------------------------------------------------------

    async def start(
        self, socket_path: str, door: Door | None = None
    ) -> tuple[StageInfo, int, str | None]:
        """As of `SchedulerActor.start`."""
        info, num_blocks, num_host_blocks = await self.stages.build()
        scheduler = replace(
            self._config.scheduler,
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            max_model_len=min(self._config.scheduler.max_model_len, info.max_model_len),
            tier_ranks=len(self.stages.tier),
        )
        if self._config.calibrate and scheduler.cost_model is None:
            scheduler = await self._calibrate(scheduler, info)
        core = self._core = build_core(scheduler)
        self._call = core.handle
        self._records = IterationRecords(core)
        self._events = open_log(self._config.event_log, self._config.event_log_bytes)
        if self._events is not None:
            self._call = Recorder(core, self._events.write).handle
        info = replace(info, max_model_len=scheduler.max_model_len)
        if door is not None:
            publisher = Publisher(door.engine_id, bits_of(self._config.stage, info), core)
            self._publication = Publication(core, publisher, self._peers)
        self._questions = Questions(
            core, self._handle, self.stages, self._recovery, self._outstanding, self._publication
        )
        self._moves.start()
        await self._peers.connect_owner(socket_path)
        address = None if door is None else await self._open_door(door, info, num_blocks)
        freeze_gc_heap()
        logger.info("ready: %s backend, %d KV blocks", info.backend, num_blocks)
        return info, num_blocks, address

    async def _open_door(self, door: Door, info: StageInfo, num_blocks: int) -> str | None:
        """Serve fronts as well; returns where they connect by TCP."""
        publication = self._publication
        assert publication is not None
        about = (info.max_model_len, info.vocab_size, info.eos_token_ids, num_blocks)

        def welcome(number: int) -> Welcome:
            asyncio.get_running_loop().call_soon(publication.publish, number)
            return Welcome(number, time.monotonic(), *about)

        publication.start()
        return await self._peers.open_door(door, welcome)

    async def _calibrate(self, scheduler: SchedulerConfig, info: StageInfo) -> SchedulerConfig:
        """The settings with a cost model, where one can be measured."""
        if self.stages.pipeline is None:
            return scheduler
        self._probe = PipelineProbe(self.stages.pipeline.submit)
        try:
            found = await calibrate_at_start(self._config, scheduler, info, self._probe.run)
        except ProbeFailed as error:
            raise StagesFailed(f"measuring steps: {error}") from error
        self._probe = None
        if found is None:
            return scheduler
        self._calibrated = info
        return within_reach(found.model, replace(scheduler, cost_model=found.model.to_dict()))

    async def finished(self) -> None:
        """Wait until the replica is gone, and with it the stages."""
        await self._finished.wait()

    def _gone(self, number: int) -> None:
        if number == OWNER:
            self._owner_gone()
        elif self._core is not None:
            for request_id in list(self._core.requests.by_id):
                if connection_of(request_id) == number:
                    self._handle(Abort(request_id))

    def _owner_gone(self) -> None:
        # The replica owns this engine: when its socket closes, the engine ends.
        # The log comes first: without its end it cannot be read, and ending stages may fail.
        self._peers.close_door()
        self._moves.forget()
        try:
            if self._events is not None:
                self._events.close()
            if self._calibrated is not None and self._core is not None:
                keep_learnt(self._config, self._calibrated, self._core.cost_model)
            self.stages.close()
        finally:
            self._finished.set()

    # ---- from the replica and fronts -----------------------------------------------------------

    def _received(self, number: int, message: Message) -> None:
        if isinstance(message, SubmitRequests):
            for request in message.requests:
                if request.sampling.grammar is None:
                    self._handle(Submit(request))
                else:
                    self._tasks.start(self._submit_with_grammar(request, request.sampling.grammar))
        elif isinstance(message, AbortRequests):
            for request_id in message.request_ids:
                self._handle(Abort(request_id))
        elif message.question == "load_adapter":
            self._tasks.start(self._answer_later(number, message))
        else:
            self._peers.send(number, self._questions.answer(message))

    async def _answer_later(self, number: int, ask: Ask) -> None:
        self._peers.send(number, await self._questions.answer_later(ask))

    async def _submit_with_grammar(self, request: Request, grammar: Grammar) -> None:
        """The last stage compiles the grammar off its step loop before the request may start."""
        try:
            problem = await self.stages.compile_grammar(grammar)
        except StagesFailed:
            problem = None  # the rebuilt stage compiles it when the request enters
        if problem is None:
            if self._peers.knows(request.request_id):
                self._handle(Submit(request))
        else:
            refusal = Refuse(request.request_id, problem, "response_format")
            self._peers.refuse(RefuseRequests((refusal,)))

    # ---- from the pipeline -----------------------------------------------------------------------

    def _answered(self, answer: StepResult | StepError) -> None:
        core = self._core
        if core is None and self._probe is not None:
            self._probe.answered(answer)
        if self._recovery.is_rebuilding or core is None:
            return
        now_s = time.monotonic()
        step = self._outstanding.answered(now_s)
        if isinstance(answer, StepError):
            logger.error("step %d failed: %s", answer.step_id, answer.message)
            message = answer.message.splitlines()[0]
            self._handle(StepFailed(step.plan.step_id, message))
            self._recovery.step_failed(message, core.faults.num_failures_in_a_row)
            return
        self._recovery.num_rebuilds_in_a_row = 0
        begin_s = answer.stage_times_s[0][0] if answer.stage_times_s else step.submitted_s
        planned = core.in_flight[0]
        self._outstanding.observe(planned.num_tokens, now_s - begin_s)
        self._handle(StepDone(answer))
        if self._records is not None:
            self._records.note(step, planned, now_s, answer, self._recovery.num_recoveries)
            if not core.in_flight:  # no answer will come to take them along
                self._peers.outputs((), self._records.take_due(now_s))

    def _overdue(self, limit_s: float) -> None:
        self._lost(f"no answer within {limit_s:.1f} s")

    # ---- recovery ----------------------------------------------------------------------------

    def _lost(self, reason: str) -> None:
        if self._core is None and self._probe is not None:
            self._probe.lost(reason)
        else:
            self._recovery.lose(reason)

    def _stages_lost(self) -> None:
        self._outstanding.clear()
        self._moves.forget()
        self._tell_ready(False)

    def _stages_rebuilt(self) -> None:
        self._tell_ready(True)
        self._handle(PipelineLost(self.stages.tier))

    def _tell_ready(self, is_ready: bool) -> None:
        self._peers.tell_all(Readiness(is_ready))
        if self._publication is not None:
            self._publication.computes(is_ready)

    # ---- the core ------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        now_s = time.monotonic()
        rows: list[tuple[Any, ...]] = []
        for instruction in self._call(event, now_s):
            if isinstance(instruction, Execute):
                self._execute(instruction, now_s)
            elif isinstance(instruction, Emit):
                rows += output_rows(instruction.outputs)
            elif isinstance(instruction, Refuse):
                self._peers.refuse(RefuseRequests((instruction,)))
            elif isinstance(instruction, WakeAt):
                self._wake_at(instruction.time_s - now_s)
            elif isinstance(instruction, Move) and not self._recovery.is_rebuilding:
                self._moves.begin(instruction)  # (else PipelineLost follows, and forgets it)
        records = [] if self._records is None else self._records.take_due(now_s)
        if rows or records:
            self._peers.outputs(rows, records)
        if self._core is not None and (self._core.requests.trials or self._told_suspects):
            suspects = suspects_of(self._core)
            self._told_suspects = bool(suspects.losses)
            self._peers.tell_all(suspects)

    def _execute(self, instruction: Execute, now_s: float) -> None:
        if self._recovery.is_rebuilding:
            return  # PipelineLost follows the rebuild and plans this work again
        self._outstanding.submitted(instruction.plan, now_s, instruction.predicted_s)
        if instruction.plan.started:
            self._peers.started([s.request_id for s in instruction.plan.started])
        if self.stages.pipeline is not None:
            self.stages.pipeline.submit(instruction.plan)

    def _wake_at(self, delay_s: float) -> None:
        if self._wake is not None:
            self._wake.cancel()
        self._wake = asyncio.get_running_loop().call_later(max(0.0, delay_s), self._handle, Tick())
