"""A planner small enough to be obviously right, to drive stages without the scheduling core.

Each iteration: every running request decodes one token, then prompts are computed in chunks, one
new request entering per iteration, so that most steps are hybrid. When blocks run out the
youngest request is put back and recomputed (or swapped out).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from actors.scheduling.plan import RequestStart, Slice, StepPlan, StepResult
from actors.scheduling.request import SamplingParams
from actors.stage.runner import StageRunner
from actors.stage.spec import StageSpec

Execute = Callable[[StepPlan], StepResult]


def make_runner(
    folder: object, num_blocks: int = 256, num_host_blocks: int = 0, **spec: object
) -> StageRunner:
    """A loaded runner with its cache, on backend `torch` unless another is named."""
    options = {"backend": "torch", "num_threads": 1, "block_size": 4, "max_model_len": 256}
    runner = StageRunner(StageSpec(str(folder), **{**options, **spec}))  # type: ignore[arg-type]
    runner.allocate(num_blocks, num_host_blocks)
    return runner


def chain(runners: Sequence[StageRunner]) -> Execute:
    """Stages one after another in this process."""

    def execute(plan: StepPlan) -> StepResult:
        carried: torch.Tensor | StepResult | None = None
        for runner in runners:
            assert not isinstance(carried, StepResult)
            carried = runner.execute(plan, carried)
        assert isinstance(carried, StepResult)
        return carried

    return execute


def make_chain(
    folder: object, num_stages: int = 1, num_blocks: int = 256, **spec: object
) -> Execute:
    return chain(
        [
            make_runner(folder, num_blocks, num_stages=num_stages, stage=stage, **spec)
            for stage in range(num_stages)
        ]
    )


@dataclass
class Live:
    request_id: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    pooling: str | None = None
    adapter: int = 0
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    host_blocks: list[int] = field(default_factory=list)


@dataclass
class MiniPlanner:
    """chunk: prompt tokens per request and step; budget: prompt tokens per step."""

    execute: Execute
    num_blocks: int = 256
    block_size: int = 4
    chunk: int = 16
    budget: int = 64
    feeds: bool = False  # several stages: the first one must be told the tokens
    num_host_blocks: int = 0  # more than 0: preempt by swapping instead of recomputing

    def __post_init__(self) -> None:
        self.free = list(range(self.num_blocks))
        self.host_free = list(range(self.num_host_blocks))
        self.results: list[StepResult] = []
        self.num_preemptions = 0
        self.num_hybrid_steps = 0

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        pooling: str | None = None,
        adapters: Sequence[int] | None = None,
    ) -> list[list[int]]:
        """Generated tokens of each prompt, end token included. adapters: as of `Request`."""
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        lives = [
            Live(i, tuple(p), s, pooling, 0 if adapters is None else adapters[i], list(p))
            for i, (p, s) in enumerate(zip(prompts, each, strict=True))
        ]
        self.waiting, self.running = list(lives), list[Live]()
        self.released: list[int] = []
        step_id = 0
        fed: list[tuple[int, int, int]] = []
        while self.waiting or self.running:
            plan = self._plan(step_id, tuple(fed) if self.feeds else ())
            result = self.execute(plan)
            assert result.step_id == step_id
            assert plan.slices or plan.released or step_id < 2, "stuck: too few blocks"
            self.results.append(result)
            fed = self._advance(plan, result)
            step_id += 1
        return [live.tokens[len(live.prompt) :] for live in lives]

    def _plan(self, step_id: int, fed: tuple[tuple[int, int, int], ...]) -> StepPlan:
        self.started: list[RequestStart] = []
        self.appended: dict[int, list[int]] = {}
        self.swap_out: list[tuple[int, int]] = []
        self.swap_in: list[tuple[int, int]] = []
        decodes, prefills, left = [], [], self.budget
        self.pinned: set[int] = set()
        if self.waiting:
            self._admit()
        for live in list(self.running):
            if live not in self.running:
                continue  # preempted for an older one a moment ago
            todo = len(live.tokens) - live.computed
            count = 1 if todo == 1 and live.computed else min(todo, self.chunk, left)
            if count == 0 or not self._reserve(live, live.computed + count):
                continue
            self.pinned.add(live.request_id)
            samples = live.computed + count == len(live.tokens) and live.pooling is None
            piece = Slice(live.request_id, live.computed, count, samples)
            if count == 1:
                decodes.append(piece)
            else:
                prefills.append(piece)
                left -= count
        self.num_hybrid_steps += bool(decodes and prefills)
        released, self.released = tuple(self.released), []
        started = {s.request_id for s in self.started}
        return StepPlan(
            step_id, (*decodes, *prefills), released, tuple(self.swap_out), tuple(self.swap_in), (),
            tuple(self.started),
            tuple((r, tuple(b)) for r, b in self.appended.items() if r not in started),
            tuple(f for f in fed if f[0] not in released),
        )  # fmt: skip

    def _admit(self) -> None:
        live = self.waiting[0]
        if len(self.free) < len(live.host_blocks) + 1:
            return
        self.waiting.pop(0)
        if live.host_blocks:
            live.blocks = [self.free.pop() for _ in live.host_blocks]
            self.swap_in = list(zip(live.host_blocks, live.blocks, strict=True))
            self.host_free += live.host_blocks
            live.host_blocks = []
        self.running.append(live)
        self.started.append(
            RequestStart(
                live.request_id, tuple(live.tokens), len(live.prompt), tuple(live.blocks),
                live.sampling, live.pooling, live.adapter,
            )
        )  # fmt: skip

    def _reserve(self, live: Live, length: int) -> bool:
        needed = -(-length // self.block_size) - len(live.blocks)
        while len(self.free) < needed:
            victim = self.running[-1]
            if victim is live or victim.request_id in self.pinned:
                return False
            self._preempt(victim)
        new = [self.free.pop() for _ in range(max(0, needed))]
        if new:
            live.blocks += new
            self.appended.setdefault(live.request_id, []).extend(new)
            for i, start in enumerate(self.started):
                if start.request_id == live.request_id:
                    self.started[i] = RequestStart(
                        start.request_id, start.tokens, start.num_prompt_tokens,
                        tuple(live.blocks), start.sampling, start.pooling, start.adapter,
                    )  # fmt: skip
        return True

    def _preempt(self, victim: Live) -> None:
        self.num_preemptions += 1
        self.running.remove(victim)
        self.waiting.insert(0, victim)
        self.released.append(victim.request_id)
        self.appended.pop(victim.request_id, None)
        self.started = [s for s in self.started if s.request_id != victim.request_id]
        if self.num_host_blocks and victim.computed:
            used = victim.blocks[: -(-victim.computed // self.block_size)]
            victim.host_blocks = [self.host_free.pop() for _ in used]
            self.swap_out += list(zip(used, victim.host_blocks, strict=True))
        else:
            victim.computed = 0
        self.free += victim.blocks
        victim.blocks = []

    def _advance(self, plan: StepPlan, result: StepResult) -> list[tuple[int, int, int]]:
        lives = {live.request_id: live for live in self.running}
        for piece in plan.named_slices:
            lives[piece.request_id].computed += piece.num_tokens
        sampling = [s.request_id for s in plan.named_slices if s.samples]
        assert [r for r, _ in result.tokens] == sampling
        fed = []
        for request_id, token in result.tokens:
            live = lives[request_id]
            fed.append((request_id, len(live.tokens), token))
            live.tokens.append(token)
            output = len(live.tokens) - len(live.prompt)
            if output >= live.sampling.max_tokens or token in live.sampling.stop_token_ids:
                self._finish(live)
        for live in list(self.running):
            if live.pooling is not None and live.computed == len(live.prompt):
                self._finish(live)
        return fed

    def _finish(self, live: Live) -> None:
        self.running.remove(live)
        self.released.append(live.request_id)
        self.free += live.blocks
        live.blocks = []
