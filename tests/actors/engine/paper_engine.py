"""An engine's real loop and core, between stages and connections made of paper.

Nothing happens by itself: the test says when the stages answer, and turns the clock.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from actors.engine.config import EngineConfig
from actors.engine.loop import EngineLoop
from actors.engine.peers import OnGone, OnMessage, connection_of
from actors.executor.stage_set import StagesFailed
from actors.fleet.publish import Publisher
from actors.fleet.snapshot import BitClass, EngineSnapshot
from actors.scheduling.build import build_core
from actors.scheduling.events import Refuse
from actors.scheduling.interfaces import TokenBudget
from actors.scheduling.plan import StepPlan
from actors.scheduling.request import FinishReason, Grammar, Request
from actors.stage.spec import StageSpec
from actors.transport.messages import (
    IterationOutputs,
    KVSaved,
    RequestsStarted,
    StepError,
    SubmitRequests,
    output_of,
)
from tests.actors.fleet.pictures import BITS
from tests.actors.scheduling.fake_stages import FakeStages, expected_output
from tests.actors.scheduling.short_lives import config


class Stages:
    """A StageSet, and its pipeline, of `FakeStages`; the test says when they answer."""

    def __init__(self, settings: Any) -> None:
        self.fake = FakeStages(settings)
        self.tier, self.pipeline = (), self
        self.unanswered: deque[StepPlan] = deque()
        self.times_s: tuple[tuple[float, float], ...] = ()  # of each stage, in answers
        self.poison: int | None = None  # a step with this request raises
        self.may_go_on = asyncio.Event()  # a rebuild, a compilation or a load
        self.may_go_on.set()
        self.may_compile = asyncio.Event()  # the grammars of a rebuild
        self.may_compile.set()
        self.is_preparing = asyncio.Event()
        self.compiled: str | StagesFailed | None = None
        self.prepared: list[set[Grammar]] = []
        self.adapters: dict[int, str] = {}
        self.lost_adapters: set[int] = set()  # slots that the next rebuild cannot fill

    def listen(self, on_answer: Any, on_lost: Any, on_standby_taken: Any) -> None:
        self._on_answer, self.lose = on_answer, on_lost

    def submit(self, plan: StepPlan) -> None:
        self.unanswered.append(plan)

    def answer(self, most: int = 1) -> None:
        for _ in range(most):
            if not self.unanswered:
                return
            plan = self.unanswered.popleft()
            if any(part.request_id == self.poison for part in plan.named_slices):
                self.fail(plan)
            else:
                self._on_answer(replace(self.fake.run(plan), stage_times_s=self.times_s))

    def fail(self, plan: StepPlan) -> None:
        self.fake.fail(plan, applied=True)
        self._on_answer(StepError(plan.step_id, "IndexError: 7\n  at line 3"))

    def answer_all(self) -> None:
        self.answer(1000)
        assert not self.unanswered, "the requests do not end"

    async def rebuild(self) -> None:
        await self.may_go_on.wait()
        self.unanswered.clear()
        for slot in self.lost_adapters:
            del self.adapters[slot]
        self.lost_adapters.clear()
        self.tier = self.fake.lose()

    async def prepare(self, grammars: set[Grammar]) -> None:
        self.prepared.append(grammars)
        self.is_preparing.set()
        await self.may_compile.wait()

    async def compile_grammar(self, grammar: Grammar) -> str | None:
        await self.may_go_on.wait()
        if isinstance(self.compiled, StagesFailed):
            raise self.compiled
        return self.compiled

    async def load_adapter(self, slot: int, folder: str) -> str | None:
        await self.may_go_on.wait()
        self.adapters[slot] = folder
        return None


class Wires:
    """Peers that note what is sent: (connection, or None for all, message)."""

    num_fronts = 2

    def __init__(self, on_message: OnMessage, on_gone: OnGone) -> None:
        self.receive, self._on_gone = on_message, on_gone
        self.sent: list[tuple[int | None, Any]] = []
        self._closed: set[int] = set()

    def close(self, number: int) -> None:
        self._closed.add(number)
        self._on_gone(number)

    def knows(self, request_id: int) -> bool:
        return connection_of(request_id) not in self._closed

    def send_outputs(self, rows: Sequence[Any], records: Sequence[Any]) -> None:
        self.sent.append((None, IterationOutputs(tuple(rows), tuple(records))))

    def send_started(self, request_ids: Sequence[int]) -> None:
        self.sent.append((None, RequestsStarted(tuple(request_ids))))

    def send_saved(self, saved: KVSaved) -> None:
        self.send(connection_of(saved.request_id), saved)

    def send_refusal(self, refusal: Refuse) -> None:
        self.send(connection_of(refusal.request_id), refusal)

    def broadcast(self, message: Any) -> None:
        self.sent.append((None, message))

    def publish(self, snapshot: EngineSnapshot, to: int | None = None) -> None:
        self.sent.append((to, snapshot))

    def send(self, number: int, message: Any) -> None:
        self.sent.append((number, message))


class Engine:
    """The loop and what is around it. now_s: its clock. engine_id: in a fleet."""

    def __init__(
        self,
        budget: TokenBudget | None = None,
        engine_id: str | None = None,
        bits: BitClass = BITS,
        **changes: Any,
    ) -> None:
        settings = config(**changes)
        self.now_s = 50.0
        self.core = build_core(settings, budget=budget)
        self.stages: Any = Stages(settings)
        self.num_ends = 0
        publisher = None if engine_id is None else Publisher(engine_id, bits, self.core)
        self.loop = EngineLoop(
            EngineConfig(StageSpec("none"), settings), self.core, self.core.handle, self.stages,
            publisher, self._end, make_peers=Wires, clock=lambda: self.now_s,  # type: ignore[arg-type]
        )  # fmt: skip
        self.wires: Any = self.loop.peers

    def _end(self) -> None:
        self.num_ends += 1

    def submit(self, *requests: Request) -> None:
        number = connection_of(requests[0].request_id)
        self.wires.receive(number, SubmitRequests(requests))

    def told(self, kind: type) -> list[Any]:
        return [message for _, message in self.wires.sent if isinstance(message, kind)]

    def stream(self, request_id: int) -> tuple[list[int], FinishReason | None, str | None]:
        """All that its caller was sent: every token once, in order, and nothing after the end."""
        tokens: list[int] = []
        reason, error = None, None
        for row in [row for message in self.told(IterationOutputs) for row in message.rows]:
            output = output_of(row)
            if output.request_id == request_id:
                assert reason is None, "an output after the end"
                assert output.index == len(tokens), "a token missing or sent twice"
                tokens += output.tokens
                reason, error = output.finish_reason, output.error
        return tokens, reason, error

    def check_complete(self, *requests: Request) -> None:
        for one in requests:
            expected = expected_output(one, self.core.config.max_model_len)
            assert self.stream(one.request_id) == (*expected, None)

    def check_empty(self) -> None:
        assert self.core.is_idle
        assert not self.stages.unanswered
        assert self.core.view.num_free_blocks == self.core.config.num_blocks


async def background() -> None:
    """Wait for every task of the loop; one may be cancelled."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(ended, Exception):
            raise ended
