"""Requests that one engine begins and another continues: their KV moves beside the steps.

The first engine computes the prompt. Each chunk that an answered step has computed is sent to the
second engine, block by block, while the next chunk is computed; the request with its first token
follows the last block. What arrives is committed to the second engine's prefix cache, as the second
tier commits what it fetched, so its core finds the prompt computed and has only the tokens behind
the last full block to compute. Steps never wait for a transfer:

- The first engine keeps a block until it has been sent. Its memory fills while the second has none.
- The second engine reserves memory for a whole prompt before its first block is sent, in order of
  request, and keeps it until the request has started there. Reservations leave the watermark free
  and wait while a running request lacks a block. If running requests starve nevertheless, the
  newest reservation is given up, and what is then missing is computed again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from actors.scheduling.events import PLAIN_FIELDS, OutputRow, Tick
from actors.scheduling.plan import SliceRow
from actors.scheduling.request import Request
from actors.scheduling.state import RequestStatus
from app.simulate.hardware.interconnect import Links
from app.simulate.run.engine import SimulatedEngine
from app.simulate.run.handover_parts import Handover, HandoverTotals
from app.simulate.run.record import RunRecord
from app.simulate.run.replica import INFINITY, Replica


class Handovers:
    """All handovers of a run.

    ahead: whether KV moves while its prompt is computed, or with the first token.
    find_target: names the engine that continues a request. submit: gives a request to an engine.
    touched: an engine's next event may have changed. at: calls back at a time.

    Call `after_event` after each event of an engine.
    """

    def __init__(
        self,
        links: Links,
        kv_bytes_per_token: float,
        record: RunRecord,
        *,
        ahead: bool = True,
        find_target: Callable[[Request, float], SimulatedEngine],
        submit: Callable[[SimulatedEngine, Request, float], bool],
        touched: Callable[[Replica, float], None],
        at: Callable[[float, Callable[[float], None]], None],
    ) -> None:
        self.links = links
        self.num_handed_over = 0
        self._kv_bytes_per_token = kv_bytes_per_token
        self._record = record
        self._ahead = ahead
        self._find_target = find_target
        self._submit = submit
        self._touched = touched
        self._at = at
        self._begun: dict[int, Handover] = {}  # until submitted at the target
        self._starting: dict[int, Handover] = {}  # submitted there and not started
        self._waiting: dict[str, deque[Handover]] = {}  # for memory of a target, in order

    @property
    def is_idle(self) -> bool:
        return not (self._begun or self._starting)

    @property
    def seeks_target(self) -> bool:
        """Whether a request has begun whose second engine is not chosen yet."""
        return any(handover.target is None for handover in self._begun.values())

    def totals(self) -> HandoverTotals:
        record, links = self._record, self.links
        seconds = np.array(record.handover_s)
        busiest_s = max(links.busy_s.values(), default=0.0)
        span_s = max(record.end_s, 1e-12)
        return HandoverTotals(
            self.num_handed_over, links.num_bytes, busiest_s / span_s, seconds[seconds > 0]
        )

    # ---- the first engine ----------------------------------------------------------------

    def watch_first(self, engine: SimulatedEngine) -> None:
        """Follow what an engine that only computes prompts has computed and emits."""

        def answered(slices: Sequence[SliceRow], now_s: float) -> None:
            for request_id, start, num_tokens, _ in slices:
                handover = self._begun.get(request_id)
                if handover is not None:
                    self._computed(handover, start + num_tokens, now_s)

        engine.replica.on_answer = answered
        engine.replica.on_emit = self._emitted

    def watch_second(self, engine: SimulatedEngine) -> None:
        """Follow what starts on an engine that continues streams."""
        started = engine.replica.on_start

        def starts(request_id: int, now_s: float) -> None:
            handover = self._starting.pop(request_id, None)
            if handover is None:
                started(request_id, now_s)
                return
            self._record.continued(request_id, now_s)
            self._release(handover)

        engine.replica.on_start = starts

    def begin(self, request: Request, source: SimulatedEngine) -> Request:
        """What the source gets of a request: its prompt and one token."""
        self._begun[request.request_id] = Handover(request, source)
        one = replace(request.sampling, max_tokens=1, min_tokens=1)
        return replace(request, sampling=one)

    def taken_back(self, request_id: int) -> Request | None:
        """The source has not taken the request, or not begun it; what was given to `begin`."""
        handover = self._begun.pop(request_id, None)
        return None if handover is None else handover.request

    def holds(self, request_id: int) -> bool:
        """Whether KV of it is on its way, so that it stays where it is."""
        handover = self._begun.get(request_id)
        return request_id in self._starting or bool(handover and handover.target)

    def _computed(self, handover: Handover, num_tokens: int, now_s: float) -> None:
        """The source has computed so much of the prompt; its full blocks may be sent."""
        core = handover.source.replica.core
        size = core.config.block_size
        if handover.target is None:
            handover.target = self._find_target(handover.request, now_s)
            handover.num_blocks = len(handover.request.prompt) // size
            if handover.num_blocks:
                name = handover.target.name
                self._waiting.setdefault(name, deque()).append(handover)
            else:
                handover.reserved = []
        known = len(handover.source_blocks)
        full = min(num_tokens // size, handover.num_blocks)
        if full > known:  # a preempted prompt computes some of it again
            state = core.live_requests[handover.request.request_id]
            fresh = state.block_table[known:full]
            core.requests.running.block_manager.share(fresh)
            handover.source_blocks += fresh
            handover.digests = state.block_hashes(full, size)
        self._reserve(handover.target, now_s)
        self._send(handover, now_s)

    def _emitted(self, rows: Sequence[OutputRow], now_s: float) -> int:
        """Record a message; the one token of a prompt that moves does not end its request."""
        begun, num_away, found = self._begun, 0, list(rows)
        for index, row in enumerate(found):
            if len(row) > PLAIN_FIELDS and row[3] is not None and row[2]:
                handover = begun.get(row[0])
                if handover is not None and handover.first_token is None:
                    found[index] = row._replace(finish_reason=None)  # type: ignore[attr-defined]
                    handover.first_token = row[2][0]
                    num_away += 1
        num_ended = self._record.emitted(found, now_s) + num_away
        if num_away:
            for row in found:
                handover = begun.get(row[0])
                if handover is not None and handover.first_token is not None:
                    self._send(handover, now_s)
        return num_ended

    # ---- on the way ----------------------------------------------------------------------

    def _send(self, handover: Handover, now_s: float) -> None:
        """Send the blocks that are computed, once the target has room; then the first token."""
        target, reserved = handover.target, handover.reserved
        if target is None or reserved is None:
            return
        if not self._ahead and handover.first_token is None:
            return
        begin, end = handover.num_sent, len(handover.source_blocks)
        if end > begin:
            handover.num_sent = end
            size = handover.source.replica.core.config.block_size
            num_blocks = max(0, end - max(begin, handover.num_there))
            arrives_s = now_s
            if num_blocks:
                num_bytes = num_blocks * size * self._kv_bytes_per_token
                arrives_s = self.links.send(handover.source.name, target.name, num_bytes, now_s)
            handover.arrived_s = max(handover.arrived_s, arrives_s)
            self._at(arrives_s, lambda then_s: self._arrived(handover, begin, end, then_s))
        is_whole = handover.num_sent == handover.num_blocks
        if is_whole and handover.first_token is not None and not handover.is_submitted:
            handover.is_submitted = True
            told_s = now_s + self.links.interconnect.latency_s  # a message waits for no KV
            self._at(
                max(told_s, handover.arrived_s), lambda then_s: self._continue(handover, then_s)
            )

    def _arrived(self, handover: Handover, begin: int, end: int, now_s: float) -> None:
        """Blocks are at the target: its cache holds them, and the source may forget them."""
        target, reserved = handover.target, handover.reserved
        assert target is not None
        assert reserved is not None
        memory = target.replica.core.requests.running.block_manager
        for block, digest in zip(reserved[begin:end], handover.digests[begin:end], strict=True):
            memory.commit(block, digest)
        source = handover.source
        source.replica.core.requests.running.block_manager.free(handover.source_blocks[begin:end])
        self._wake(source, now_s)

    def _continue(self, handover: Handover, now_s: float) -> None:
        """The first token is at the target: the request goes on there."""
        target, request, token = handover.target, handover.request, handover.first_token
        assert target is not None
        assert token is not None
        del self._begun[request.request_id]
        self._starting[request.request_id] = handover
        self.num_handed_over += 1
        if not self._submit(target, replace(request, output=(token,)), now_s):
            raise RuntimeError(f"{target.name} refuses to continue request {request.request_id}")

    # ---- the second engine's memory --------------------------------------------------------

    def after_event(self, engine: SimulatedEngine, now_s: float) -> None:
        """Call it after each event of an engine: memory may have become free, or have run out."""
        if engine.name in self._waiting:
            self._reserve(engine, now_s)
        if engine.replica.next_s == INFINITY and engine.replica.num_live:
            self._give_up(engine, now_s)

    def _reserve(self, target: SimulatedEngine, now_s: float) -> None:
        """Give memory to the handovers that wait for this target, the first one first."""
        waiting = self._waiting.get(target.name)
        core = target.replica.core
        running = core.requests.running
        memory = running.block_manager
        while waiting:
            handover = waiting[0]
            alone = target.replica.num_live == 0
            spare = 0 if alone else int(core.config.watermark * memory.num_blocks)
            claimant = running.claimant
            lacks = claimant is not None and claimant.status is RequestStatus.RUNNING
            there = memory.match(handover.all_digests(core.config.block_size))
            num_taken = handover.num_blocks - len(there) + memory.num_unreferenced(there)
            if lacks or num_taken + 1 + spare > memory.num_free:
                return
            waiting.popleft()
            memory.share(there)
            handover.num_there = len(there)
            handover.reserved = there + memory.allocate(handover.num_blocks - len(there))
            self._send(handover, now_s)

    def _release(self, handover: Handover) -> None:
        """The target's core references the blocks itself now, or computes them again."""
        target, reserved = handover.target, handover.reserved
        assert target is not None
        if reserved:
            target.replica.core.requests.running.block_manager.free(reserved)
        handover.reserved = []

    def _give_up(self, engine: SimulatedEngine, now_s: float) -> None:
        """An engine with requests plans nothing: release what the newest handover holds there."""
        for handover in reversed(self._starting.values()):
            if handover.target is engine and handover.reserved:
                self._release(handover)
                self._wake(engine, now_s)
                return

    def _wake(self, engine: SimulatedEngine, now_s: float) -> None:
        """Let an engine that stands still plan with the memory that has become free."""
        replica = engine.replica
        if replica.next_s == INFINITY and replica.num_live:
            replica.submit(Tick(), now_s)
            self._touched(replica, now_s)
