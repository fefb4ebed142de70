"""The real core with lookahead, driving a stage that may launch steps ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch

from actors.scheduling.build import build_core
from actors.scheduling.config import SchedulerConfig
from actors.scheduling.events import Emit, Event, Execute, StepDone, Submit
from actors.scheduling.plan import StepPlan, StepResult, TokenLogprobs
from actors.scheduling.request import Request, SamplingParams
from actors.stage.cuda.run_ahead import Following
from tests.actors.stage.greedy_reference import make_prompts

LENGTHS = (1, 3, 13)


class Runner(Protocol):
    """A StageRunner, or several ranks as one."""

    def execute(
        self, plan: StepPlan, hidden_TH: None, following: Following | None = None
    ) -> torch.Tensor | StepResult | None: ...


class Engine:
    """The real core with lookahead over a stage; `ahead` lists the steps launched early."""

    def __init__(self, runner: Runner, **changes: object) -> None:
        config: dict[str, object] = {
            "num_blocks": 256, "block_size": 4, "max_requests": 4, "max_model_len": 64,
            "max_step_tokens": 64, "token_budget": 16, "lookahead": True, "prefix_cache": False,
        }  # fmt: skip
        self.core = build_core(SchedulerConfig(**{**config, **changes}))  # type: ignore[arg-type]
        self.runner = runner
        self.plans: deque[StepPlan] = deque()
        self.outputs: dict[int, list[int]] = {}
        self.ahead: list[int] = []
        self.logprobs: dict[int, list[TokenLogprobs]] = {}
        self.num_steps = 0  # that computed something
        self.now_s = 0.0

    def send(self, event: Event) -> None:
        self.now_s += 0.001
        for instruction in self.core.handle(event, self.now_s):
            if isinstance(instruction, Execute):
                self.plans.append(instruction.plan)
            elif isinstance(instruction, Emit):
                for output in instruction.outputs:
                    tokens = self.outputs.setdefault(output.request_id, [])
                    tokens.extend(output.tokens)

    def step(self) -> None:
        plan = self.plans.popleft()
        self.num_steps += bool(plan.slices)
        result = self.runner.execute(plan, None, self.following)
        assert isinstance(result, StepResult)
        for request_id, entry in result.logprobs:
            self.logprobs.setdefault(request_id, []).append(entry)
        self.send(StepDone(result))

    def following(self, wait_s: float) -> StepPlan | None:
        if not self.plans:
            return None
        self.ahead.append(self.plans[0].step_id)
        return self.plans[0]

    def finish(self) -> None:
        while self.plans:
            self.step()

    def answer(self, requests: Sequence[Request]) -> list[list[int]]:
        """Tokens of these requests, in their order."""
        for request in requests:
            self.send(Submit(request))
        self.finish()
        return [self.outputs[request.request_id] for request in requests]


def requests(sampling: Sequence[SamplingParams]) -> list[Request]:
    prompts = make_prompts(LENGTHS)
    return [
        Request(i, tuple(p), s, 0.0) for i, (p, s) in enumerate(zip(prompts, sampling, strict=True))
    ]
