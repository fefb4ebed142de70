"""The adaptive budget, step by step: what it holds back, and for which requests."""

from __future__ import annotations

import dataclasses
import math
import random
from itertools import product

import pytest

from actors.scheduling.budgets import adaptive
from actors.scheduling.budgets.adaptive import PATIENCE, SLOW_PATIENCE, AdaptiveBudget
from actors.scheduling.budgets.step_sizes import LEAST_HAND_OVER, SizeChoice
from actors.scheduling.build import build_core
from actors.scheduling.cost.mix import Mix
from actors.scheduling.cost.model import CostModel
from actors.scheduling.cost.online import OnlineCostModel
from actors.scheduling.events import DeliveryTook, Execute, Reconfigure, StepDone, Submit
from actors.scheduling.plan import StepResult, StepShape
from actors.scheduling.request import Objective, Request, SamplingParams
from tests.actors.scheduling.budgets.tiled_model import TILED
from tests.actors.scheduling.modeled import modeled


def test_without_decodes_or_objective_nothing_is_held_back() -> None:
    for tbt_s in (0.05, None):
        config = modeled(TILED, budget="adaptive", max_requests=32, tbt_s=tbt_s)
        core = build_core(config, cost_model=OnlineCostModel(TILED))
        request = Request(0, (0,) * 3000, SamplingParams(5), 0.0)
        out = core.handle(Submit(request), 0.0)
        plan = next(i.plan for i in out if isinstance(i, Execute))
        assert plan.num_tokens == 3000


def test_where_streams_leave_steps_are_no_longer_than_makes_prompts_cheap() -> None:
    def most(max_step_tokens: int) -> int:
        cost = OnlineCostModel(TILED)
        config = modeled(TILED, max_step_tokens=max_step_tokens, tbt_s=0.05).handing_over()
        engine = build_core(config, cost_model=cost).view
        return AdaptiveBudget.build(config, cost).num_tokens(StepShape(), engine)

    usual = most(8192)
    rates = [n / (TILED.overhead_s + TILED.linear_s(n)) for n in range(1, 8193)]
    assert LEAST_HAND_OVER < usual < 2048
    assert rates[usual - 1] >= 0.9 * max(rates)
    assert most(256) == 256


def test_where_streams_leave_a_first_token_under_way_shortens_no_step() -> None:
    model = dataclasses.replace(TILED, num_stages=2)
    config = modeled(model, budget="adaptive", max_requests=32, tbt_s=0.05).handing_over()
    core = build_core(config, cost_model=OnlineCostModel(model))
    plans = []
    for request_id, num_tokens in enumerate((100, 3000)):
        request = Request(request_id, (0,) * num_tokens, SamplingParams(5), 0.0)
        out = core.handle(Submit(request), 0.0)
        plans += [i.plan for i in out if isinstance(i, Execute)]
    assert plans[0].num_tokens == 100
    sizes = SizeChoice(OnlineCostModel(model), config.max_step_tokens, 0.9, 0.9, False)
    assert plans[1].num_tokens == sizes.hand_over_tokens < 3000


def test_steps_end_at_tile_edges_while_work_waits() -> None:
    core = build_core(
        modeled(TILED, budget="adaptive", max_requests=32, tbt_s=0.05),
        cost_model=OnlineCostModel(TILED),
    )
    budget = core.builder.budget
    assert isinstance(budget, AdaptiveBudget)
    cheapest = budget._sizes.usual.at_most(200)
    rates = [n / (TILED.overhead_s + TILED.linear_s(n)) for n in range(1, 201)]
    assert cheapest == 192 == 1 + max(range(200), key=lambda i: (rates[i], i))


def _first_token_beside(
    tbt_s: float,
    deployment_tbt_s: float | None,
    budget: str = "adaptive",
    cost: OnlineCostModel | None = None,
) -> tuple[float, float]:
    """Seconds until a 300-token prompt has its first token beside a stream with this objective; and
    of the longest step until then."""
    cost = cost or OnlineCostModel(TILED)
    model = cost.profile
    config = modeled(model, budget=budget, max_requests=32, tbt_s=deployment_tbt_s, lookahead=False)
    core = build_core(config, cost_model=cost)
    stream = Request(1, (1,) * 50, SamplingParams(3900), 0.0, objective=Objective(tbt_s=tbt_s))
    out, now_s, submitted = core.handle(Submit(stream), 0.0), 0.0, False
    longest_s = 0.0
    while now_s < 30.0:
        (plan,) = [i.plan for i in out if isinstance(i, Execute)]
        step_s = model.stage_s(Mix.of(plan.slices))
        now_s += step_s
        longest_s = max(longest_s, step_s) if submitted else 0.0
        tokens = tuple((s.request_id, 9) for s in plan.named_slices if s.samples)
        if any(request_id == 2 for request_id, _ in tokens):
            return now_s - 0.5, longest_s
        out = core.handle(StepDone(StepResult(plan.step_id, tokens)), now_s)
        if now_s > 0.5 and not submitted:
            submitted = True
            core.handle(Submit(Request(2, (2,) * 300, SamplingParams(5), now_s)), now_s)
    return math.inf, longest_s


@pytest.mark.parametrize("budget", ["adaptive", "auto"])
@pytest.mark.parametrize("deployment_tbt_s", [None, 0.05])
def test_a_stream_with_a_tight_objective_starves_no_prompt(
    deployment_tbt_s: float | None, budget: str
) -> None:
    """10.2 ms a decode: an objective of 11 leaves nothing for prefill, one of 50 all it needs."""
    assert _first_token_beside(0.05, deployment_tbt_s, budget)[0] < 0.3
    for tight_s in (0.011, 0.012, 0.0135):
        assert _first_token_beside(tight_s, deployment_tbt_s, budget)[0] < 3.0


@pytest.mark.parametrize("budget", ["adaptive", "auto"])
def test_on_a_noisy_machine_a_prompt_goes_on_by_small_chunks(
    budget: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step in thirty takes 1.5 times as long: by its bound a decode of 10 ms leaves nothing of
    17, by its expected time it does."""
    monkeypatch.setattr(adaptive, "DENIALS", 1000)  # steps after which the noise is forgotten
    model = CostModel("linear", ((1, 0.010), (1024, 0.110)), kv_tokens=64_000, max_model_len=4096)
    cost = OnlineCostModel(model)
    for num_tokens, number in product((0, 16, 40, 200), range(300)):
        shape = StepShape(1, 60, ((0, num_tokens),) if num_tokens else ())
        noise = 1.5 if number % 30 == 0 else 1.0
        cost.observe(shape, noise * model.stage_s(Mix.of_shape(shape)))
    ttft_s, longest_s = _first_token_beside(0.017, 0.017, budget, cost)
    assert longest_s <= 0.017
    assert (ttft_s < 3.0) == (budget == "auto")  # the other gives a token now and then


@pytest.mark.parametrize("budget", ["adaptive", "auto"])
def test_beside_a_lone_prompt_steps_are_shorter_the_noisier_they_are(budget: str) -> None:
    """Steps take up to 1.2 times as long as usual, one in ten of them."""
    sizes = []
    for num_prompts in (1, 2):
        cost = OnlineCostModel(TILED)
        for number in range(600):
            shape = StepShape(1, 60, ((0, (16, 64, 192, 400)[number % 4]),))
            factor = 1.2 if number % 10 == 0 else 1.0
            cost.observe(shape, factor * TILED.stage_s(Mix.of_shape(shape)))
        core = build_core(
            modeled(TILED, budget=budget, max_requests=32, tbt_s=0.05, lookahead=False),
            cost_model=cost,
        )
        stream = Request(0, (1,) * 50, SamplingParams(500), 0.0)
        (first,) = [i.plan for i in core.handle(Submit(stream), 0.0) if isinstance(i, Execute)]
        for number in range(num_prompts):
            core.handle(Submit(Request(number + 1, (2,) * 3000, SamplingParams(5), 0.01)), 0.01)
        plan, now_s = first, 0.02
        for _ in range(2):  # in the second one the first prompt has begun
            tokens = tuple((s.request_id, 9) for s in plan.named_slices if s.samples)
            out = core.handle(StepDone(StepResult(plan.step_id, tokens)), now_s)
            (plan,) = [i.plan for i in out if isinstance(i, Execute)]
            now_s += TILED.stage_s(Mix.of(plan.slices))
        sizes.append(plan.num_tokens)
    lone, queued = sizes
    assert (lone < queued) == (budget == "auto")


def test_delays_of_short_steps_do_not_cut_the_next_lone_prompt_small() -> None:
    """A mixture's steps grow little with their tokens: cut small, a prompt takes far longer. After
    a bad moment of long steps, short ones are run, of which one in ten is delayed."""
    tokens_s = ((1, 0.03), (2, 0.04), (4, 0.058), (8, 0.073), (16, 0.085), (32, 0.1), (8192, 12.0))
    model = CostModel("mixture", tokens_s, kv_tokens=1 << 17, max_model_len=4096)
    config = modeled(model, budget="auto", max_requests=32, tbt_s=0.5, max_step_tokens=8192)

    def size(moments: tuple[tuple[int, int, int, float], ...]) -> int:
        core = build_core(config, cost_model=(cost := OnlineCostModel(model)))
        for num_prefill, num_steps, often, factor in moments:
            shape = StepShape(16, 1600, ((0, num_prefill),))
            for step in range(num_steps):
                delayed = factor if step % often == 0 else 1.0
                cost.observe(shape, delayed * model.stage_s(Mix.of_shape(shape)))
        out, now_s = core.handle(Submit(Request(0, (1,) * 50, SamplingParams(500), 0.0)), 0.0), 0.0
        core.handle(Submit(Request(1, (2,) * 3000, SamplingParams(5), 0.0)), 0.0)
        for _ in range(2):  # the prompt has begun in the second one, and none waits
            (plan,) = [i.plan for i in out if isinstance(i, Execute)]
            now_s += model.stage_s(Mix.of(plan.slices))
            tokens = tuple((s.request_id, 9) for s in plan.named_slices if s.samples)
            out = core.handle(StepDone(StepResult(plan.step_id, tokens)), now_s)
        return next(i.plan.num_tokens for i in out if isinstance(i, Execute))

    calm, bad = (200, 250, 50, 1.1), (200, 10, 2, 1.5)
    assert size((calm, bad)) < size((calm, bad, (20, 400, 10, 1.6))) < size((calm,))


@pytest.mark.parametrize("budget", ["adaptive", "auto"])
def test_relief_waits_for_the_end_of_a_slow_moment(budget: str) -> None:
    cost = OnlineCostModel(TILED)
    config = modeled(TILED, budget=budget, max_requests=32, tbt_s=0.05)
    planned = build_core(config, cost_model=cost).builder.budget
    assert isinstance(planned, AdaptiveBudget)
    shape, seen = StepShape(1, 60), []
    for factor, num_steps in ((1.0, 400), (1.5, 40), (1.0, 200)):
        for _ in range(num_steps):
            cost.observe(shape, factor * TILED.stage_s(Mix.of_shape(shape)))
        seen.append(planned._patience())
    slow = PATIENCE * (SLOW_PATIENCE if budget == "auto" else 1)
    assert seen == [PATIENCE, slow, PATIENCE]


@pytest.mark.parametrize("tbt_s", [0.05, None])
def test_where_decodes_alone_are_too_many_it_says_that_starts_wait(tbt_s: float | None) -> None:
    """5 ms a decode: 16 of them take 90 ms."""
    model = dataclasses.replace(TILED, decode_slice_s=0.005)
    config = modeled(model, budget="adaptive", max_requests=32, tbt_s=tbt_s, lookahead=False)
    core = build_core(config, cost_model=OnlineCostModel(model))
    due = []
    for number in range(16):
        request = Request(number + 1, (number,) * 20, SamplingParams(40), 0.0)
        due += core.handle(Submit(request), 0.0)
    most, seen, now_s = 0, set(), 0.0
    while not core.is_idle:
        (plan,) = [i.plan for i in due if isinstance(i, Execute)]
        now_s += model.stage_s(Mix.of(plan.slices))
        tokens = tuple((s.request_id, 9) for s in plan.named_slices if s.samples)
        due = core.handle(StepDone(StepResult(plan.step_id, tokens)), now_s)
        most = max(most, len(core.view.decoding))
        seen.add((core.holds_starts, core.view.num_waiting > 0))
    if tbt_s is None:
        assert most == 16
        assert not any(holds for holds, _ in seen)
    else:
        assert 4 <= most < 9
        assert (True, True) in seen
        assert (True, False) not in seen


@pytest.mark.parametrize(
    ("tbt_s", "delivery_s", "took_s", "left_s"),
    [
        (0.08, 0.003, 0.0, 0.0032),
        (0.05, 0.003, 0.0, 0.003),
        (0.02, 0.003, 0.0, 0.002),
        (0.05, 0.0, 0.0, 0.002),
        (0.08, 0.003, 0.01, 0.01),
        (0.02, 0.003, 0.01, 0.005),
    ],
)
def test_the_way_to_the_client_gets_a_share_of_the_objective(
    tbt_s: float, delivery_s: float, took_s: float, left_s: float
) -> None:
    """At least 4 %, `delivery_s` where that is more, and a tenth at most; what replicas report,
    and a quarter at most."""
    model = dataclasses.replace(TILED, tokens_s=((1, 0.01), (2049, 0.21)))
    config = modeled(model, budget="adaptive", tbt_s=tbt_s, delivery_s=delivery_s)
    core = build_core(config, cost_model=OnlineCostModel(model))
    core.handle(DeliveryTook(took_s), 0.0)
    due = core.handle(Submit(Request(1, (1,) * 20, SamplingParams(40), 0.0)), 0.0)
    now_s = 0.0
    for step in range(2):  # each takes as long as predicted, so nothing else is left aside
        (plan,) = [i.plan for i in due if isinstance(i, Execute)]
        now_s += model.stage_s(Mix.of(plan.slices))
        if step:
            core.handle(Submit(Request(2, (2,) * 3000, SamplingParams(5), now_s)), now_s)
        due = core.handle(StepDone(StepResult(plan.step_id, ((1, 9),))), now_s)
    (plan,) = [i.plan for i in due if isinstance(i, Execute)]
    budget = core.builder.budget
    assert isinstance(budget, AdaptiveBudget)
    longest_s = (tbt_s - left_s) * budget._kept.value
    mix = Mix.of(plan.slices)
    assert mix.prefill_tokens > 8
    assert model.stage_s(mix) <= longest_s
    mix.add(mix.prefill_tokens, 8)
    assert model.stage_s(mix) > longest_s


def test_what_admission_promises_is_planned_with_fewer_misses() -> None:
    """Also where it is switched on while requests run."""
    core = build_core(modeled(TILED, budget="auto", tbt_s=0.1), cost_model=OnlineCostModel(TILED))
    planned = []
    for admission in ("all", "predictive", "all"):
        core.handle(Reconfigure({"admission": admission}), 0.0)
        budget = core.builder.budget
        assert isinstance(budget, AdaptiveBudget)
        budget._kept.note(kept=False, taken=1.1)
        planned.append((budget.allowed_misses, budget._kept.value))
    assert planned[0] == planned[2]
    assert planned[1] < planned[0]


def _step_beside_a_stream_s(admission: str, seed: int) -> float:
    """The predicted time of a step with a long prompt, on a machine whose steps are uneven."""
    chance, cost = random.Random(seed), OnlineCostModel(TILED)
    for shape in (StepShape(1, 100, ((0, n),)) for n in (100, 300, 900)):
        usual_s = TILED.stage_s(Mix.of_shape(shape))
        for _ in range(300):
            cost.observe(shape, usual_s * math.exp(chance.expovariate(12.0)))
    core = build_core(
        modeled(TILED, budget="auto", tbt_s=0.1, admission=admission), cost_model=cost
    )
    due = core.handle(Submit(Request(1, (1,) * 20, SamplingParams(40), 0.0)), 0.0)
    (plan,) = [i.plan for i in due if isinstance(i, Execute)]
    core.handle(Submit(Request(2, (2,) * 3000, SamplingParams(5), 0.0)), 0.0)
    due = core.handle(StepDone(StepResult(plan.step_id, ((1, 9),))), 0.01)
    (plan,) = [i.plan for i in due if isinstance(i, Execute)]
    mix = Mix.of(plan.slices)
    assert (mix.num_decodes, mix.prefill_tokens > 8) == (1, True)
    return TILED.stage_s(mix) * cost.ratio(mix)


@pytest.mark.parametrize("seed", range(3))
def test_what_admission_promises_is_planned_with_room_for_steps_never_seen(seed: int) -> None:
    usual_s, promised_s = (_step_beside_a_stream_s(name, seed) for name in ("all", "predictive"))
    assert 0.03 < promised_s < 0.85 * usual_s
    # Errors are exponential with a mean of 1 / 12: one step in a thousand takes this much longer.
    assert promised_s * math.exp((math.log(1000) - 1) / 12) < 0.1
