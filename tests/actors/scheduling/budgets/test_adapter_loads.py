"""Adapters that load beside steps: in what the objectives leave, and to their end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.scheduling.budgets.adapter_loads import UNPROMISED_LOAD_S
from actors.scheduling.build import build_core
from actors.scheduling.core import Core
from actors.scheduling.cost.mix import Mix
from actors.scheduling.cost.model import CostModel
from actors.scheduling.cost.online import OnlineCostModel
from actors.scheduling.events import AdapterLoads, Execute, Instruction, StepDone, Submit
from actors.scheduling.plan import StepPlan, StepResult
from actors.scheduling.request import Request, SamplingParams
from tests.actors.scheduling.budgets.tiled_model import TILED
from tests.actors.scheduling.modeled import modeled

TBT_S = 0.05
NUM_STREAMS = 16


class Stages:
    """Stages that take as long as the model says, and longer by all that a plan lets them load."""

    def __init__(self, core: Core, model: CostModel) -> None:
        self.core = core
        self.model = model
        self.now_s = 0.0
        self.free_s = [0.0] * model.num_stages
        self.waiting: list[tuple[float, StepPlan]] = []  # when each ends
        self.last_s = 0.0
        self.gaps_s: list[float] = []  # of the first stream
        self.loaded_s = 0.0  # by each rank
        self.num_prefilled = 0

    def take(self, out: list[Instruction]) -> None:
        for plan in [i.plan for i in out if isinstance(i, Execute)]:
            step_s = self.model.stage_s(Mix.of(plan.slices)) + plan.adapter_load_s
            end_s = self.now_s
            for stage, free_s in enumerate(self.free_s):
                end_s = self.free_s[stage] = max(end_s, free_s) + step_s
            self.waiting.append((end_s, plan))

    def submit(self, request: Request) -> None:
        self.take(self.core.handle(Submit(request), self.now_s))

    def answer(self) -> StepPlan:
        self.now_s, plan = self.waiting.pop(0)
        tokens = tuple((s.request_id, 9) for s in plan.named_slices if s.samples)
        if any(request_id == 0 for request_id, _ in tokens):
            self.gaps_s.append(self.now_s - self.last_s)
            self.last_s = self.now_s
        self.loaded_s += plan.adapter_load_s
        self.num_prefilled += sum(s.num_tokens for s in plan.named_slices if s.num_tokens > 1)
        self.take(self.core.handle(StepDone(StepResult(plan.step_id, tokens)), self.now_s))
        return plan


def busy(
    model: CostModel, budget: str = "auto", prompts: int = 0, output: int = 2000, **changes: object
) -> Stages:
    """Streams that decode, and prompts of 2000 tokens that wait behind them. output: tokens of each
    stream."""
    settings = {"max_requests": 32, "tbt_s": TBT_S, **changes}
    config = modeled(model, budget=budget, **settings)
    stages = Stages(build_core(config, cost_model=OnlineCostModel(model)), model)
    for number in range(NUM_STREAMS):
        stages.submit(Request(number, (1,) * 50, SamplingParams(output), 0.0))
    for _ in range(60):
        stages.answer()
    for number in range(prompts):
        stages.submit(Request(100 + number, (2,) * 2000, SamplingParams(1), stages.now_s))
    return stages


@pytest.mark.parametrize("prompts", [0, 50])
@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("lookahead", [False, True])
def test_streams_keep_their_objective_and_the_load_ends(
    prompts: int, num_stages: int, lookahead: bool
) -> None:
    """A load of a second for each rank, on an engine that is always busy."""
    model = replace(TILED, num_stages=num_stages)
    stages = busy(model, prompts=prompts, lookahead=lookahead)
    core = stages.core
    stages.gaps_s.clear()
    begin_s, before = stages.now_s, stages.num_prefilled
    stages.take(core.handle(AdapterLoads(1), stages.now_s))
    while stages.loaded_s < 1.0:
        stages.answer()
        assert stages.now_s < begin_s + 30.0
    assert max(stages.gaps_s) <= TBT_S
    if prompts:
        assert stages.num_prefilled > before
    else:
        assert stages.now_s < begin_s + 6.0
    assert core.cost_model is not None
    core.handle(AdapterLoads(0), stages.now_s)
    for _ in range(core.config.depth):
        stages.answer()
    assert stages.answer().adapter_load_s == 0.0


def test_steps_beside_a_load_teach_nothing_of_their_shape() -> None:
    stages = busy(TILED)
    shape = stages.core.in_flight[0].shape
    cost = stages.core.cost_model
    assert cost is not None
    before_s = cost.step_s(shape)
    stages.take(stages.core.handle(AdapterLoads(1), stages.now_s))
    for _ in range(50):
        stages.answer()
    assert stages.loaded_s > 0.1
    assert cost.step_s(shape) == pytest.approx(before_s)


@pytest.mark.parametrize(("budget", "tbt_s"), [("fixed", TBT_S), ("auto", None)])
def test_without_an_objective_or_a_time_it_has_a_constant(budget: str, tbt_s: float | None) -> None:
    stages = busy(TILED, budget, tbt_s=tbt_s)
    stages.take(stages.core.handle(AdapterLoads(2), stages.now_s))
    stages.answer()
    assert stages.answer().adapter_load_s == UNPROMISED_LOAD_S


def test_decodes_that_take_the_whole_objective_leave_the_least() -> None:
    stages = busy(TILED, tbt_s=0.012)
    stages.take(stages.core.handle(AdapterLoads(1), stages.now_s))
    stages.answer()
    assert 0.0 < stages.answer().adapter_load_s < 0.001
