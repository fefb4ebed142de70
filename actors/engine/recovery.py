"""Rebuilds lost stages, and ends the engine if that does not help."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Collection
from concurrent import futures
from typing import NoReturn

from actors.executor.stage_set import StageSet
from actors.scheduling.core import Core
from actors.scheduling.events import Output, OutputRow
from actors.scheduling.request import FAILS_ALWAYS, MAX_LOSSES, Grammar
from actors.scheduling.state import Fate, RequestStatus
from actors.transport.background_tasks import BackgroundTasks
from actors.transport.messages import Suspects
from actors.transport.notices import notify

logger = logging.getLogger("legato.recovery")

_LAST_WORDS_S = 3.0
# A single faulty request fails fewer steps in a row: suspects are halved, and one half succeeds.
_MAX_FAILED_STEPS = 4
_MAX_OVERFLOWS = 4  # requests in a row
# Errors of a process, not of a request: its device is unusable, or it lacks memory or files (an
# ImportError: the first grammar mask imports the grammar compiler, which fails without memory).
_BEYOND_REPAIR = (
    "CUDA error",
    "NCCL error",
    "Triton Error [CUDA]",  # where a launch of its kernels is the first call to be told
    "ImportError:",
    "MemoryError:",
    "ModuleNotFoundError:",  # transformers raises it for any failed import
    "OSError:",
    "can't allocate memory",
    "can't start new thread",
)
# torch's, of a GPU's memory: this step alone took too much, and a smaller one may fit.
_OUT_OF_GPU_MEMORY = "OutOfMemoryError:"


def suspects_of(core: Core) -> Suspects:
    """The suspects, which the replica keeps for the next scheduler if this one dies."""
    suspects = [
        (state.request_id, state.suspicion.num_losses)
        for group in core.trials
        for state in group
        if state.suspicion is not None
    ]
    in_flight = {part.request_id for step in core.in_flight for part in step.plan.named_slices}
    return Suspects(
        tuple(suspects), tuple([number for number, _ in suspects if number in in_flight])
    )


def suspects_of_loss(
    core: Core, steps_are_suspect: bool, first_dropped: int | None
) -> tuple[Suspects, list[OutputRow]]:
    """What `PipelineLost` will make of the steps in flight, for fronts, which send these requests
    elsewhere before it: who is suspect then, and the end of one that has lost too many.
    steps_are_suspect, first_dropped: as there."""
    losses, flying = dict(suspects_of(core).losses), core.in_flight if steps_are_suspect else ()
    steps = [s for s in flying if first_dropped is None or s.plan.step_id < first_dropped]
    members = dict.fromkeys([state for step in steps for state in step.members()])
    ends: list[OutputRow] = []
    for state in members:
        if state.status is RequestStatus.FINISHING and state.fate is Fate.END:
            continue
        number = losses.get(state.request_id, 0) + 1
        losses[state.request_id] = number
        if len(members) == 1 and number >= MAX_LOSSES:
            ends.append(Output.failed(state.request_id, state.num_output_tokens, FAILS_ALWAYS))
    return Suspects(tuple(losses.items()), (), stages_are_lost=True), ends


def grammars_of(core: Core) -> set[Grammar]:
    """The grammars of live requests."""
    found = (state.request.sampling.grammar for state in core.live_requests.values())
    return {grammar for grammar in found if grammar is not None}


class Recovery:
    """Rebuilds the stages when they are lost or fail every step, a bounded number of times.

    on_lost is called when a rebuild begins, on_built once there are stages again, while what is
    planned is still dropped, on_rebuilt once they have compiled the grammars of live requests
    (`grammars`). num_requests: how many are live. engine_id: None outside a fleet.
    """

    def __init__(
        self,
        stages: StageSet,
        max_rebuilds: int,
        tasks: BackgroundTasks,
        on_lost: Callable[[], None],
        on_built: Callable[[], None],
        grammars: Callable[[], Collection[Grammar]],
        on_rebuilt: Callable[[], None],
        num_requests: Callable[[], int],
        engine_id: str | None = None,
    ) -> None:
        self._stages = stages
        self._max_rebuilds = max_rebuilds
        self._tasks = tasks
        self._on_lost = on_lost
        self._on_built = on_built
        self._grammars = grammars
        self._on_rebuilt = on_rebuilt
        self._num_requests = num_requests
        self._engine_id = engine_id
        self.num_rebuilds_in_a_row = 0  # reset by the loop when a step succeeds
        self.is_rebuilding = False
        self.steps_are_suspect = True  # those in flight at the latest loss, as in `PipelineLost`
        self._num_overflows = 0  # in a row, when last told
        self._lost_anew: list[str] = []  # why the stages that are being prepared are lost too
        self._preparing: asyncio.Task[None] | None = None
        self.num_recoveries = 0

    def step_failed(self, message: str, num_in_a_row: int) -> None:
        """Rebuild after an error of the process, or after too many failed steps in a row."""
        is_repairable = message.startswith(_OUT_OF_GPU_MEMORY)
        if not is_repairable and any(words in message for words in _BEYOND_REPAIR):
            self.lose(message, steps_are_suspect=False)
        elif num_in_a_row >= _MAX_FAILED_STEPS:
            self.lose(f"{num_in_a_row} steps failed in a row: {message}", steps_are_suspect=False)

    def overflowed(self, num_in_a_row: int) -> None:
        """Rebuild, once, if so many requests have overflowed, and none has got a token meanwhile,
        that the stages may be at fault. If that does not help, the model is."""
        before = self._num_overflows if num_in_a_row >= self._num_overflows else 0
        self._num_overflows = num_in_a_row
        if before < _MAX_OVERFLOWS <= num_in_a_row:
            reason = f"the output of {num_in_a_row} requests in a row was not finite"
            self.lose(reason, steps_are_suspect=False)

    def pipeline_lost(self, reason: str) -> None:
        """As `lose`, for what a pipeline says: during a rebuild only that of new stages speaks."""
        self._lost_anew.append(reason)
        if self._preparing is not None:
            self._preparing.cancel()
        self.lose(reason)

    def lose(self, reason: str, steps_are_suspect: bool = True) -> None:
        """Rebuild the stages, because they are lost. During a rebuild this concerns the old ones,
        e.g. the deadline of a step that they did not answer. steps_are_suspect: as in
        `PipelineLost`."""
        if not self.is_rebuilding:
            self.is_rebuilding = True
            self.steps_are_suspect = steps_are_suspect
            self._tasks.start(self._rebuild(reason))

    async def _rebuild(self, reason: str) -> None:
        """Kill the remaining stages, build new ones, and replay the running requests."""
        begin_s = time.monotonic()
        try:
            self._on_lost()
            while True:
                line, _, rest = reason.partition("\n")
                if rest:  # e.g. the traceback of a rank
                    logger.error("stages lost: %s", reason)
                self.num_rebuilds_in_a_row += 1
                if self.num_rebuilds_in_a_row > self._max_rebuilds:
                    self._give_up(f"{line}; {self._max_rebuilds} rebuilds did not help")
                notify(
                    f"stages lost ({line}): rebuilding them, requests waiting: "
                    f"{self._num_requests()} (rebuild {self.num_rebuilds_in_a_row} of "
                    f"{self._max_rebuilds})",
                    self._engine_id,
                )
                self._lost_anew.clear()  # `rebuild` at once closes the pipeline that spoke
                try:
                    await self._stages.rebuild()
                    self._on_built()
                    if not self._lost_anew:
                        await self._prepare()
                    if not self._lost_anew:
                        break
                    reason = self._lost_anew[0]
                except Exception as failure:  # e.g. a full disk, no sockets, no memory
                    reason = f"{type(failure).__name__}: {failure}"
            self.is_rebuilding = False
            self.num_recoveries += 1
            notify(
                f"stages rebuilt in {time.monotonic() - begin_s:.1f} s, requests going on: "
                f"{self._num_requests()}",
                self._engine_id,
            )
            self._on_rebuilt()
        except Exception:  # of any type: a half-rebuilt engine serves nothing
            logger.exception("recovery failed")
            self._give_up("recovery itself failed")

    async def _prepare(self) -> None:
        """Not to its end where a stage dies: the last one may wait long for a grammar."""
        preparing = asyncio.create_task(self._stages.prepare(self._grammars()))
        self._preparing = preparing
        await asyncio.wait([preparing])
        self._preparing = None
        if not preparing.cancelled():
            preparing.result()

    def _give_up(self, reason: str) -> NoReturn:
        """End this process. The replica then builds a new scheduler, or is replaced itself."""
        try:
            said = notify(f"giving up on the stages: {reason}", self._engine_id)
            if said is not None:
                futures.wait([said], timeout=_LAST_WORDS_S)
        finally:  # whatever it cannot say: alive, it would only keep its requests waiting
            os._exit(1)
