"""One rank of one pipeline stage as a Ray actor: plans or activations in, tensor work, results out.

The compiled graph runs two methods per step here. `gate` sleeps in a socket read until this step
may start (the first stage receives the plan there, later stages a bare ticket from the stage
before); `forward` then reads the activations, which by then are in the channel, computes, and
wakes the next stage. A single stage passes no activations on: each of its ranks serves step after
step within one execution of the graph and sends its answers by a socket. Other calls run beside it.

The process that creates these actors imports this module too, but does not need torch, whose import
takes longer than all others: so torch is imported where it is used.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from actors.scheduling.events import KVMove, TierChange
from actors.scheduling.plan import StepPlan, StepResult
from actors.scheduling.request import Grammar
from actors.stage.hub_folder import on_this_node
from actors.stage.load_pace import Loads
from actors.stage.spec import StageInfo, StageSpec, TierSpec
from actors.stage.warm_up import import_all
from actors.transport.addresses import free_address
from actors.transport.gc_utils import freeze_gc_heap
from actors.transport.messages import TICKET, StageAnswer, StageMessage, pack, unpack
from actors.transport.wire import ConnectionLost, Mailbox, Sender

if TYPE_CHECKING:
    import torch

    from actors.stage.kv_mover import KVMover
    from actors.stage.runner import StageRunner
    from actors.stage.step_times import StepTimes

logger = logging.getLogger("legato.stage")


class StageActor:
    """Owns a StageRunner. All methods except gate and forward are ordinary actor calls."""

    def __init__(self, spec: StageSpec, channel_bytes: int | None = None) -> None:
        """channel_bytes: buffer of one channel of a compiled graph; None without a graph."""
        if channel_bytes is not None:
            from actors.transport.graph_pipeline import set_channel_bytes

            set_channel_bytes(channel_bytes)
        if spec.device != "cpu":
            from actors.transport.communicator import claim_device

            spec = replace(spec, device=str(claim_device(spec.device)))
        self._spec = spec
        self._is_last, self._is_alone = spec.is_last, spec.is_alone
        self._runner: StageRunner | None = None
        self._mailbox: Mailbox | None = None
        self._next: Sender | None = None
        self._step_times: StepTimes | None = None
        self._mover: KVMover | None = None
        self._loads = Loads()  # of adapters
        self._has_begun, self._loading = False, 0.0  # to load; the part that is done
        self._seen: tuple[bytes, StepPlan] | None = None  # a plan received before its step
        self._next_call = 0  # the ticket that the next call of `step` must carry

    # ---- life ------------------------------------------------------------------------------

    @ray.method(concurrency_group="watch")
    def pid(self) -> int:
        return os.getpid()

    @ray.method(concurrency_group="watch")
    def is_unused(self) -> bool:
        """Whether this is still a standby that has not begun to load."""
        return not self._has_begun

    def warm_up(self, with_grammars: bool, when_idle: bool) -> None:
        """See `warm_up.import_all`."""
        import_all(with_grammars, when_idle)

    def load(self, group_address: str | None = None) -> StageInfo:
        """group_address: "host:port" where the stage's ranks meet, if there are several."""
        from actors.stage.runner import StageRunner

        self._has_begun = True
        self._enter()
        self._spec = replace(on_this_node(self._spec), group_address=group_address)
        self._runner = StageRunner(self._spec, self._note_progress)
        return self._runner.info

    def _note_progress(self, fraction: float) -> None:
        self._loading = fraction

    @ray.method(concurrency_group="watch")
    def loading_progress(self) -> float:
        return self._loading

    def _enter(self) -> None:
        """Set this rank's device as the current one, which is a setting of each thread."""
        if self._spec.device.startswith("cuda:"):
            import torch

            torch.cuda.set_device(self._spec.device)

    def allocate(self, num_blocks: int, num_host_blocks: int, num_requests: int = 0) -> None:
        self._enter()
        self._running().allocate(num_blocks, num_host_blocks, num_requests)

    def settle(self, wait_s: float) -> None:
        """The last call before the first step. wait_s: at most, for the KV cache's memory."""
        self._running().wait_for_memory(wait_s)
        freeze_gc_heap()

    def node_id(self) -> str:
        return ray.get_runtime_context().get_node_id()

    def listen(self, path: str | None, secret: bytes) -> str:
        """Open the mailbox, at a path or (None) at a free port of this node; returns where."""
        self._mailbox = Mailbox(path or f"{ray.util.get_node_ip_address()}:0", secret)
        return self._mailbox.address

    def free_address(self, one_node: bool = False) -> str:
        """A free rendezvous address for a group of ranks, "host:port". one_node: all are on this
        node.
        """
        return free_address("127.0.0.1" if one_node else ray.util.get_node_ip_address())

    def connect_next(self, address: str, secret: bytes) -> None:
        self._next = Sender(address, secret)

    def time_on_device(self, address: str | None, secret: bytes) -> None:
        """From now on measure steps by the device's clock. address: where an earlier stage reports
        its times; None for the last one, whose answer has them."""
        from actors.stage.step_times import StepTimes

        sender = None if address is None else Sender(address, secret)
        self._step_times = StepTimes(self._spec.stage, sender)

    def compile_grammar(self, grammar: Grammar) -> str | None:
        """None for a grammar that compiles, else an error message."""
        try:
            self._running().compile_grammar(grammar)
        except ValueError as error:
            return str(error)
        return None

    @ray.method(concurrency_group="loads")
    def load_adapter(self, slot: int, folder: str) -> str | None:
        """`StageAdapters.load` beside the steps; returns an error message or None."""
        load = self._running().load_adapter
        return self._loads.run(folder, self._enter, lambda: load(slot, Path(folder)))

    @ray.method(concurrency_group="watch")
    def leave_load(self) -> None:
        self._loads.leave()

    def open_tier(self, spec: TierSpec) -> tuple[bytes, ...]:
        """Open the second tier of the prefix cache; returns the digests that it already holds.

        Raises ValueError naming an invalid setting."""
        from actors.stage.kv_mover import KVMover

        self._enter()
        kv = self._running().kv
        assert kv is not None, "allocate first"
        self._mover = KVMover(spec, kv, self._spec.device)
        return self._mover.held()

    @ray.method(concurrency_group="moves")
    def move(self, move: KVMove) -> tuple[int, TierChange]:
        """Carry a move out; returns how many of its blocks were kept, or came, from the first, and
        other changes of the store. Runs beside the steps."""
        assert self._mover is not None
        self._enter()
        done = 0
        try:
            done = self._mover.carry_out(move)
        except Exception:  # e.g. of a disk or a device: blocks that are not moved are computed
            logger.exception("KV was not moved")
        return done, self._mover.changes()

    @ray.method(concurrency_group="watch")
    def watch(self) -> None:
        """Never returns: the call fails when this process dies, which notifies the caller."""
        threading.Event().wait()

    def _running(self) -> StageRunner:
        if self._runner is None:
            raise RuntimeError("stage used before load()")
        return self._runner

    # ---- one step ------------------------------------------------------------------------------

    def gate(self, ticket: int) -> tuple[int, bytes]:
        """Sleep until step `ticket` may start; the first stage receives its plan here.

        Returns (ticket, packed plan): empty for later stages, whose plan comes with the
        activations, and after the stage before has died (the scheduler then rebuilds, or has
        ended).
        """
        assert self._mailbox is not None
        try:
            frame = self._mailbox.receive()
        except ConnectionLost:
            return ticket, b""
        (woken_for,) = TICKET.unpack_from(frame)
        if woken_for != ticket:
            raise RuntimeError(
                f"stage {self._spec.stage} at ticket {ticket} was woken for {woken_for}"
            )
        return ticket, frame[TICKET.size :]

    def forward_first(self, gated: tuple[int, bytes]) -> StageMessage | StageAnswer:
        if self._is_alone:
            return self._serve_alone(gated)
        ticket, packed = gated
        return self._step((ticket, packed, None, (), None))

    def _serve_alone(self, gated: tuple[int, bytes]) -> StageAnswer:
        """Answer plan after plan by the socket, until the scheduler closes the mailbox."""
        assert self._next is not None
        ticket, packed = gated
        while packed:
            answer = self._compute((ticket, packed, None, (), None))
            with contextlib.suppress(ConnectionLost):
                self._next.send(pack(answer))
            ticket, packed = self.gate(ticket + 1)
        return ticket, b"", None

    def forward(
        self, gated: tuple[int, bytes], message: StageMessage
    ) -> StageMessage | StageAnswer:
        if gated[0] != message[0]:
            raise RuntimeError(f"ticket {gated[0]} was handed activations of {message[0]}")
        return self._step(message)

    @ray.method(concurrency_group="compute")
    def step(self, message: StageMessage) -> StageMessage | StageAnswer:
        """One step by an ordinary actor call, without mailboxes."""
        expected, self._next_call = self._next_call, self._next_call + 1
        if message[0] != expected:
            raise RuntimeError(
                f"stage {self._spec.stage} at step {expected} was called for {message[0]}"
            )
        return self._step(message)

    def _following(self, wait_s: float) -> StepPlan | None:
        """The plan of the next step, if it comes within wait_s, so that a single stage can launch
        early.

        It is unpacked once: its step gets it from `_plan_of`.
        """
        assert self._mailbox is not None
        frame = self._mailbox.peek(wait_s)
        packed = b"" if frame is None else frame[TICKET.size :]
        if not packed:
            return None
        self._seen = (packed, unpack(StepPlan, packed))
        return self._seen[1]

    def _plan_of(self, packed: bytes) -> StepPlan:
        seen, self._seen = self._seen, None
        return seen[1] if seen is not None and seen[0] == packed else unpack(StepPlan, packed)

    def _step(self, message: StageMessage) -> StageMessage | StageAnswer:
        """Compute one micro-batch and wake the next stage, or the scheduler after the last."""
        answer = self._compute(message)
        if self._next is not None:
            with contextlib.suppress(ConnectionLost):
                self._next.send(TICKET.pack(message[0]))
        return answer

    def _compute(self, message: StageMessage) -> StageMessage | StageAnswer:
        """Exceptions travel as data, so that the chain never breaks."""
        self._enter()
        ticket, packed, hidden, times, error = message
        begin_s = time.monotonic()
        begun: Any = None
        output: torch.Tensor | StepResult | None = None
        if error is None and packed:
            try:
                begun = None if self._step_times is None else self._step_times.begin()
                plan = self._plan_of(packed)
                looks = self._is_alone and self._mailbox is not None
                following = self._following if looks else None
                output = self._running().execute(plan, hidden, following)
            # The boundary of fault isolation: every exception of a step must reach the scheduler
            # as the answer to that step, or all later steps would wait for ever.
            except Exception as failure:
                error = f"{type(failure).__name__}: {failure}\n{traceback.format_exc(limit=-4)}"
                logger.warning("%s", error)  # the answer may wait for ranks that wait for this one
        drafting_s = output.drafting_s if isinstance(output, StepResult) else 0.0
        took = (begin_s, time.monotonic() - drafting_s)
        if self._step_times is not None and begun is not None:
            with contextlib.suppress(RuntimeError):  # of a device that failed, and so the step
                took = self._step_times.end(ticket, begun) or took
        times = (*times, took)
        result = output if isinstance(output, StepResult) else None
        if not self._is_last:
            return ticket, packed, None if result is not None else output, times, error
        packed_result = b"" if result is None else pack(replace(result, stage_times_s=times))
        return ticket, packed_result, error
