"""The core's promises one at a time, each in a life short enough to follow by eye."""

from __future__ import annotations

from typing import Any

import pytest
from scheduling_fakes import Driver, expected_output

from actors.scheduling.build import build_core
from actors.scheduling.config import ConfigError, SchedulerConfig
from actors.scheduling.events import (
    Abort,
    Emit,
    Execute,
    PipelineLost,
    Reconfigure,
    Refuse,
    StepDone,
    Submit,
    Tick,
    WakeAt,
)
from actors.scheduling.interfaces import EngineView, Refusal, RequestView, StepShape
from actors.scheduling.plan import StepResult, TokenLogprobs
from actors.scheduling.policies import POLICIES
from actors.scheduling.request import FinishReason, Request, SamplingParams


def config(**changes: Any) -> SchedulerConfig:
    settings: dict[str, Any] = {
        "num_blocks": 40,
        "block_size": 4,
        "max_requests": 8,
        "max_model_len": 64,
        "max_step_tokens": 64,
        "token_budget": 16,
        "lookahead": False,
        "prefix_cache": False,
    }
    return SchedulerConfig(**(settings | changes))


def request(number: int, prompt: int = 4, output: int = 4, **more: Any) -> Request:
    tokens = more.pop("tokens", None) or tuple((number + i) % 7 for i in range(prompt))
    sampling = SamplingParams(output, **more.pop("sampling", {}))
    more.setdefault("arrival_s", float(number))
    return Request(number, tokens, sampling, output=more.pop("done", ()), **more)


def slices(driver: Driver, step: int) -> list[tuple[int, int, int, bool]]:
    return [tuple(part) for part in driver.plans[step].slices]


# ---- the pipeline ------------------------------------------------------------------------


def test_lookahead_plans_the_next_step_before_the_token_is_known() -> None:
    driver = Driver(config(lookahead=True))
    driver.submit(request(1, prompt=3, output=3))
    assert [slices(driver, s) for s in range(len(driver.plans))] == [
        [(1, 0, 3, True)],
        [(1, 3, 1, True)],
    ]
    driver.drain()
    # never past max_tokens: the third token comes from position 4, and nothing behind it
    assert [slices(driver, s) for s in range(len(driver.plans))][2:] == [[(1, 4, 1, True)]]


def test_what_was_planned_beyond_a_stop_token_is_thrown_away() -> None:
    wanted = request(1, prompt=5, output=30)
    tokens, _ = expected_output(wanted, 64)
    stop = tokens[2]
    wanted = request(1, prompt=5, output=30, sampling={"stop_token_ids": (stop,)})
    driver = Driver(config(lookahead=True))
    driver.submit(wanted)
    driver.drain()
    caller = driver.callers[1]
    assert caller.finish is FinishReason.STOP
    assert caller.tokens == tokens[: tokens.index(stop) + 1]
    assert len(driver.plans) == len(caller.tokens) + 1  # one step too many, answered unheard
    assert driver.core.residents.blocks.num_free == 40


def test_several_stages_hold_a_request_once_and_are_fed_its_tokens() -> None:
    driver = Driver(config(num_stages=3))
    for number in (1, 2, 3):
        driver.submit(request(number, prompt=3, output=3))
    assert len(driver.outstanding) == 3  # one micro-batch each
    driver.answer()
    plan = driver.plans[3]
    assert plan.fed == ((1, 3, driver.callers[1].tokens[0]),)
    driver.drain()
    driver.check_everyone_finished()


def test_min_tokens_and_the_context_limit() -> None:
    driver = Driver(config(max_model_len=10))
    everything = tuple(range(11))
    driver.submit(
        request(1, prompt=4, output=50, sampling={"stop_token_ids": everything, "min_tokens": 3})
    )
    driver.submit(request(2, prompt=4, output=50))
    driver.drain()
    assert len(driver.callers[1].tokens) == 4  # the stop token itself is delivered
    assert driver.callers[1].finish is FinishReason.STOP
    assert len(driver.callers[2].tokens) == 6
    assert driver.callers[2].finish is FinishReason.LENGTH


def test_an_answer_out_of_order_is_an_error() -> None:
    driver = Driver(config(num_stages=2))
    driver.submit(request(1))
    driver.submit(request(2))
    with pytest.raises(ValueError, match="oldest outstanding is 0"):
        driver.core.handle(StepDone(StepResult(1, ((2, 0),))), 1.0)
    with pytest.raises(ValueError, match="0 tokens for 1 sampling"):
        driver.core.handle(StepDone(StepResult(0, ())), 1.0)


# ---- stall-free batching ------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 17, 60])
@pytest.mark.parametrize("budget", [4, 5, 16])
def test_no_prompt_stalls_a_decode(length: int, budget: int) -> None:
    driver = Driver(config(token_budget=budget))
    for number in range(4):
        driver.submit(request(number, prompt=3, output=30))
    while len(driver.core.residents.decoding) < 4:
        driver.answer()
    driver.submit(request(9, prompt=length, output=4))
    before = len(driver.plans)
    for _ in range(10):
        driver.answer()
    for plan in driver.plans[before:]:
        assert {0, 1, 2, 3} <= {part.request_id for part in plan.slices}
        # decodes alone may exceed the budget, a chunk never does
        assert plan.num_tokens <= max(budget, sum(p.num_tokens == 1 for p in plan.slices))
    if budget <= 4:  # no room for a chunk beside four decodes, and none is forced
        assert all(part.request_id != 9 for plan in driver.plans[before:] for part in plan.slices)
    driver.drain()


def test_dynamic_chunks_fall_as_a_prompt_progresses() -> None:
    options = {"chunks": "dynamic", "high": 64, "low": 32, "stages": 2, "span": 256}
    driver = Driver(
        config(
            num_blocks=200,
            max_model_len=512,
            max_step_tokens=128,
            policy_options=options,
            token_budget=1,
        )
    )
    driver.submit(request(1, prompt=300, output=1))
    driver.drain()
    assert [plan.num_tokens for plan in driver.plans] == [64, 64] + [32] * 5 + [12]


def test_chunks_are_cut_to_tiles() -> None:
    driver = Driver(config(token_budget=15, tile=4))
    driver.submit(request(1, prompt=2, output=20))
    driver.answer()
    driver.submit(request(2, prompt=30, output=2))
    driver.drain()
    assert [plan.num_tokens for plan in driver.plans[2:5]] == [12, 12, 9]  # 1 + 11, 1 + 11, 1 + 8


def test_long_prompts_share_a_step_with_short_ones() -> None:
    driver = Driver(config(token_budget=16, max_chunk=6))
    driver.submit(request(0, prompt=1, output=2))  # keeps the step busy while others arrive
    driver.submit(request(1, prompt=60, output=2))
    driver.submit(request(2, prompt=6, output=2))
    driver.submit(request(3, prompt=3, output=2))
    driver.answer()
    # the cap gives all three a share; what is left goes back to the first
    assert [(s[0], s[2]) for s in slices(driver, 1)] == [(0, 1), (1, 6), (2, 6), (3, 3)]
    driver.answer()
    assert [(s[0], s[2]) for s in slices(driver, 2)] == [(2, 1), (3, 1), (1, 14)]
    driver.drain()


# ---- memory -------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("allocation", ["prompt", "chunk"])
def test_memory_for_one_is_enough_for_all(policy: str, allocation: str) -> None:
    driver = Driver(
        config(num_blocks=16, policy=policy, allocation=allocation, lookahead=True, swap="never")
    )
    for number in range(6):
        driver.submit(request(number, prompt=10 + 5 * number, output=20))
    driver.drain()
    driver.check_everyone_finished()
    assert all(len(caller.tokens) == 20 for caller in driver.callers.values())


def test_preemption_takes_the_worst_rank_and_keeps_its_tokens() -> None:
    driver = Driver(config(num_blocks=6, max_model_len=24, watermark=0.0))
    driver.submit(request(1, prompt=8, output=10))
    driver.submit(request(2, prompt=8, output=10))
    while not driver.core.statistics()["num_preemptions"]:
        driver.answer()
    assert driver.core.residents.states[2].status.value == "waiting"
    told = len(driver.callers[2].tokens)
    assert told > 1
    driver.drain()
    first, again, *_ = (s for p in driver.plans for s in p.started if s.request_id == 2)
    assert len(first.tokens) == 8
    assert len(again.tokens) == 8 + told  # prompt and everything already delivered
    assert len(driver.callers[2].tokens) == 10


@pytest.mark.parametrize("policy", ["orca", "faster_transformer"])
def test_reserving_the_maximum_length_never_preempts(policy: str) -> None:
    driver = Driver(config(num_blocks=16, policy=policy, lookahead=True))
    for number in range(6):
        driver.submit(request(number, prompt=10, output=20))
    most_running = 0
    while driver.outstanding:
        most_running = max(most_running, driver.core.residents.num_residents)
        driver.answer()
    assert most_running == 2  # 8 blocks each, whatever they use so far
    assert driver.core.statistics()["num_preemptions"] == 0
    assert not any(plan.new_blocks for plan in driver.plans)
    driver.check_everyone_finished()


def test_request_level_batches_are_closed() -> None:
    driver = Driver(
        config(policy="faster_transformer", policy_options={"max_batch": 2}, num_blocks=200)
    )
    for number in range(5):
        driver.submit(request(number, output=3 + number))
    driver.drain()
    steps = {n: [p.step_id for p in driver.plans for s in p.slices if s[0] == n] for n in range(5)}
    for first, second in (((0, 1), (2, 3)), ((2, 3), (4,))):
        assert max(steps[n][-1] for n in first) < min(steps[n][0] for n in second)


class FixedCost:
    """Recomputing costs 1 s a token, swapping `block_s` a block."""

    def __init__(self, block_s: float) -> None:
        self.block_s = block_s
        self.observed: list[tuple[StepShape, float]] = []

    def step_s(self, shape: StepShape) -> float:
        return float(shape.num_tokens)

    def swap_s(self, num_blocks: int) -> float:
        return num_blocks * self.block_s

    def observe(self, shape: StepShape, duration_s: float) -> None:
        self.observed.append((shape, duration_s))


@pytest.mark.parametrize(("block_s", "swaps"), [(0.1, True), (100.0, False)])
def test_swapping_is_chosen_by_predicted_cost(block_s: float, swaps: bool) -> None:
    cost_model = FixedCost(block_s)
    settings = config(num_blocks=6, num_host_blocks=6, max_model_len=24, watermark=0.0)
    driver = Driver(settings, build_core(settings, cost_model=cost_model))
    driver.submit(request(1, prompt=8, output=10))
    driver.submit(request(2, prompt=8, output=10))
    driver.drain()
    driver.check_everyone_finished()
    moved = [plan for plan in driver.plans if plan.swap_out or plan.swap_in]
    assert bool(moved) == swaps
    assert driver.core.statistics()["num_preemptions"] > 0
    assert cost_model.observed[0] == (StepShape(0, 0, ((0, 8),)), pytest.approx(0.02))
    predicted = [i.predicted_s for _, _, out in driver.log for i in out if isinstance(i, Execute)]
    assert predicted[0] == 8.0


def test_a_cached_prefix_is_not_computed_again() -> None:
    driver = Driver(config(prefix_cache=True))
    driver.submit(request(1, tokens=tuple(range(14)), output=3))
    driver.drain()
    driver.submit(request(2, tokens=(*range(12), 50, 51), output=3))
    driver.drain()
    driver.submit(request(3, tokens=tuple(range(12)), output=3))  # a hit to its very end
    driver.drain()
    driver.submit(request(4, tokens=tuple(range(12)), output=3, cache_salt="another tenant"))
    driver.drain()
    first = {number: driver.callers[number].first for number in (1, 2, 3, 4)}
    cached = {number: output.num_cached_tokens for number, output in first.items() if output}
    assert cached == {1: 0, 2: 12, 3: 8, 4: 0}  # of 12, the last block is computed for its logits


def test_the_cache_survives_preemption_and_serves_replays() -> None:
    driver = Driver(config(prefix_cache=True, num_blocks=9, max_model_len=36, watermark=0.0))
    driver.submit(request(1, prompt=16, output=12))
    driver.submit(request(2, prompt=12, output=12))
    driver.drain()
    assert driver.core.statistics()["num_preemptions"] > 0
    tokens = tuple(driver.callers[1].tokens[:9])
    driver.submit(request(3, tokens=driver.callers[1].request.prompt, output=12, done=tokens))
    driver.drain()
    first = driver.callers[3].first
    assert first is not None
    assert first.index == 9  # numbering goes on
    assert len(driver.callers[3].tokens) == 12  # max_tokens counts the earlier life


def test_a_group_computes_its_prompt_once() -> None:
    driver = Driver(config())
    for number in (1, 2, 3):
        driver.submit(request(number, tokens=tuple(range(10)), output=3, group="g", arrival_s=0.0))
    driver.drain()
    computed = sum(part.num_tokens for plan in driver.plans for part in plan.slices)
    assert computed == 10 + 2 * 1 + 3 * 2  # the prompt, the followers' last token, decodes
    copies = [pair for plan in driver.plans for pair in plan.copies]
    assert len(copies) == 2  # each follower its own third block
    assert driver.callers[2].first is not None
    assert driver.callers[2].first.num_cached_tokens == 9
    driver.check_everyone_finished()


def test_a_group_outlives_its_leader() -> None:
    driver = Driver(config(token_budget=4))
    for number in (1, 2, 3):
        driver.submit(request(number, tokens=tuple(range(10)), output=3, group="g", arrival_s=0.0))
    driver.answer()
    driver.abort(1)
    driver.drain()
    assert [driver.callers[n].finish for n in (1, 2, 3)] == [
        FinishReason.ABORT,
        FinishReason.LENGTH,
        FinishReason.LENGTH,
    ]
    driver.check_everyone_finished()


# ---- at the door --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        (request(1, tokens=(1,) * 64), "prompt"),
        (request(1, tokens=(1,) * 70, output=1), "prompt"),
        (request(1, output=0), "max_tokens"),
        (Request(1, (), SamplingParams(1), 0.0), "prompt"),
        (request(1, prompt=30, output=20), "max_tokens"),
        (request(1, prompt=50, output=1), "prompt"),
        (request(1, prompt=65, pooling="mean"), "prompt"),
    ],
)
def test_the_impossible_is_refused_at_once(wrong: Request, param: str) -> None:
    core = build_core(config(num_blocks=10))
    (refusal,) = core.handle(Submit(wrong), 0.0)
    assert isinstance(refusal, Refuse)
    assert refusal.param == param
    assert refusal.retry_after_s is None
    assert core.is_idle


def test_the_longest_possible_request_is_served() -> None:
    driver = Driver(config(num_blocks=16, watermark=0.3))
    driver.submit(request(1, prompt=60, output=100))
    driver.drain()
    assert len(driver.callers[1].tokens) == 4


def test_a_full_queue_refuses_for_a_while() -> None:
    driver = Driver(config(max_requests=1, max_queued_requests=2))
    for number in range(5):
        driver.submit(request(number))
    refused = {n: c.refused for n, c in driver.callers.items() if c.refused}
    assert set(refused) == {3, 4}
    assert all(refusal.retry_after_s for refusal in refused.values())
    driver.drain()
    driver.submit(request(9))
    driver.drain()
    driver.check_everyone_finished()


def test_queued_tokens_are_limited_but_one_always_fits() -> None:
    driver = Driver(config(max_requests=1, max_queued_tokens=20))
    driver.submit(request(1, prompt=5))
    driver.submit(request(2, prompt=50))  # alone in the queue
    driver.submit(request(3, prompt=5))
    assert driver.callers[2].refused is None
    assert driver.callers[3].refused is not None
    driver.drain()


def test_tenants_have_caps() -> None:
    driver = Driver(config(max_running_per_tenant=1, max_queued_per_tenant=2))
    for number in range(6):
        driver.submit(request(number, tenant="greedy", output=8))
    driver.submit(request(7, tenant="modest", output=8))
    assert [n for n, c in driver.callers.items() if c.refused] == [3, 4, 5]
    driver.answer()
    running = {s.request_id for s in driver.core.residents.states.values() if s.blocks}
    assert running == {0, 7}
    driver.drain()
    driver.check_everyone_finished()


def test_whoever_waits_too_long_is_refused_on_time() -> None:
    driver = Driver(config(max_requests=1, queue_timeout_s=5.0))
    driver.submit(request(1, output=30))
    driver.submit(request(2))
    assert driver.wake_at_s is not None
    instructions = driver.send(Tick(), after_s=5.5)
    assert isinstance(instructions[0], Refuse)
    assert instructions[0].request_id == 2
    assert instructions[0].retry_after_s is not None
    driver.drain()
    assert driver.callers[1].finish is FinishReason.LENGTH
    assert not any(isinstance(i, WakeAt) for i in driver.send(Tick()))


class Picky:
    """Refuses odd ids; lets nobody start beside another."""

    def on_submit(self, request: Request, engine: EngineView) -> Refusal | None:
        odd = request.request_id % 2
        return Refusal("odd", retry_after_s=engine.num_waiting + 1.0) if odd else None

    def may_start(self, request: RequestView, engine: EngineView) -> bool:
        return not (engine.decoding or engine.prefilling)


def test_admission_has_the_last_word_but_cannot_hang_the_engine() -> None:
    settings = config()
    driver = Driver(settings, build_core(settings, admission=Picky()))
    for number in range(6):
        driver.submit(request(number))
    assert [c.refused is not None for c in driver.callers.values()] == [False, True] * 3
    driver.drain()
    for plan in driver.plans:
        assert len(plan.slices) == 1


# ---- leaving ------------------------------------------------------------------------------


def test_abort_works_in_every_state() -> None:
    driver = Driver(config(lookahead=True, max_requests=2))
    for number in range(1, 5):
        driver.submit(request(number, prompt=6, output=20))
    for _ in range(4):
        driver.answer()
    states = driver.core.residents.states
    assert states[1].in_flight == 2
    assert states[3].status.value == "waiting"
    driver.abort(1)  # in flight
    driver.abort(1)  # already leaving
    driver.abort(3)  # waiting
    driver.abort(77)  # unknown
    assert driver.callers[1].finish is driver.callers[3].finish is FinishReason.ABORT
    driver.drain()
    driver.abort(2)  # finished
    driver.check_everyone_finished()


def test_a_late_token_of_an_aborted_request_is_not_delivered() -> None:
    core = build_core(config())
    core.handle(Submit(request(1)), 0.0)
    assert isinstance(core.handle(Abort(1), 0.1)[0], Emit)
    assert core.handle(StepDone(StepResult(0, ((1, 5),))), 0.2) == []
    assert core.is_idle


def test_logprobs_travel_with_their_tokens() -> None:
    core = build_core(config(token_budget=3))
    core.handle(Submit(request(1, prompt=5, output=2, sampling={"prompt_logprobs": 1})), 0.0)
    entries = [TokenLogprobs(token, -0.5, 1, ()) for token in range(5)]
    core.handle(StepDone(StepResult(0, (), prompt_logprobs=((1, 1, tuple(entries[1:4])),))), 0.1)
    own = TokenLogprobs(9, -0.1, 1, ((9, -0.1),))
    emit, *_ = core.handle(
        StepDone(
            StepResult(1, ((1, 9),), logprobs=((1, own),), prompt_logprobs=((1, 4, (entries[4],)),))
        ),
        0.2,
    )
    assert isinstance(emit, Emit)
    (output,) = emit.outputs
    assert output.logprobs == (own,)
    assert output.prompt_logprobs == (None, *entries[1:])
    emit, *_ = core.handle(StepDone(StepResult(2, ((1, 8),), logprobs=((1, own),))), 0.3)
    assert isinstance(emit, Emit)
    assert emit.outputs[0].prompt_logprobs == ()


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_pooling_ends_with_the_prompt(pooling: str) -> None:
    driver = Driver(config(token_budget=3, lookahead=True, prefix_cache=True))
    driver.submit(request(1, prompt=10, pooling=pooling))
    driver.drain()
    assert driver.callers[1].pooled
    assert driver.callers[1].finish is FinishReason.STOP
    assert not any(part.samples for plan in driver.plans for part in plan.slices)
    driver.submit(request(2, tokens=driver.callers[1].request.prompt, pooling=pooling))
    driver.drain()
    computed = sum(p.num_tokens for plan in driver.plans for p in plan.slices if p.request_id == 2)
    assert computed == (10 if pooling == "mean" else 2)  # the mean needs every position
    driver.check_everyone_finished()


def test_a_finished_replay_ends_at_once() -> None:
    core = build_core(config())
    done = request(1, output=3)
    for output, reason in (((1, 2, 3), FinishReason.LENGTH), ((1, 6), FinishReason.STOP)):
        again = Request(1, done.prompt, SamplingParams(3, stop_token_ids=(6,)), 0.0, output=output)
        (emit,) = core.handle(Submit(again), 0.0)
        assert isinstance(emit, Emit)
        assert emit.outputs[0].finish_reason is reason
        assert emit.outputs[0].index == len(output)
        assert core.is_idle


# ---- failures -----------------------------------------------------------------------------


def test_a_poisoned_request_is_found_and_the_others_finish() -> None:
    driver = Driver(config(lookahead=True))
    for number in range(6):
        driver.submit(request(number, output=9))
    driver.poison.add(4)
    driver.drain()
    driver.check_everyone_finished(but_errors=[4])
    assert driver.callers[4].finish is FinishReason.ERROR


def test_a_named_culprit_alone_ends() -> None:
    driver = Driver(config())
    for number in range(4):
        driver.submit(request(number, output=9))
    for _ in range(4):
        driver.answer()
    driver.fail(applied=True, culprit=2)
    assert driver.callers[2].finish is FinishReason.ERROR
    driver.drain()
    driver.check_everyone_finished(but_errors=[2])


def test_one_lonely_failure_is_forgiven() -> None:
    driver = Driver(config())
    driver.submit(request(1, output=9))
    for _ in range(3):
        driver.answer()
        driver.fail(applied=False)
        driver.answer()
    driver.drain()
    driver.check_everyone_finished()


def test_a_lost_pipeline_costs_a_pause_only() -> None:
    driver = Driver(config(num_stages=2))
    for number in range(4):
        driver.submit(request(number, output=9))
    for turn in range(6):
        for _ in range(4 + turn):
            if driver.outstanding:
                driver.answer()
        driver.lose()
    driver.drain()
    driver.check_everyone_finished()


def test_a_request_that_kills_the_stages_is_given_up() -> None:
    driver = Driver(config())
    for number in range(3):
        driver.submit(request(number, output=4))
    for _ in range(100):
        if not driver.outstanding:
            break
        if 1 in {part.request_id for part in driver.outstanding[0].slices}:
            driver.lose()
        else:
            driver.answer()
    driver.check_everyone_finished(but_errors=[1])
    assert driver.callers[1].finish is FinishReason.ERROR


def test_an_empty_engine_survives_everything() -> None:
    driver = Driver(config())
    for _ in range(3):
        driver.send(PipelineLost())
        driver.send(Tick())
        driver.abort(1)
    driver.submit(request(1))
    driver.drain()
    driver.check_everyone_finished()


# ---- pipelines kept uniform ---------------------------------------------------------------


def test_uniform_micro_batches_share_decodes_and_prompts() -> None:
    """Eight requests over two stages: the largest step tells how long the other stage waits."""

    def largest_steps(micro_batches: str) -> list[int]:
        driver = Driver(
            config(
                num_blocks=200,
                num_stages=2,
                micro_batches=micro_batches,
                token_budget=64,
                max_requests=8,
            )
        )
        driver.submit(request(0, prompt=4, output=40))
        for number in range(1, 8):
            driver.submit(request(number, prompt=4, output=40))
        for _ in range(40):
            driver.answer()
        sizes = [plan.num_tokens for plan in driver.plans[-10:]]
        driver.drain()
        return sorted(sizes)

    assert largest_steps("uniform") == [4] * 10
    assert largest_steps("greedy") == [1] * 5 + [7] * 5


def test_chunks_of_a_prompt_may_follow_each_other_through_the_stages() -> None:
    driver = Driver(config(num_stages=3, overlap_chunks=True, token_budget=8))
    driver.submit(request(1, prompt=20, output=3))
    assert [slices(driver, step) for step in range(3)] == [
        [(1, 0, 8, False)],
        [(1, 8, 8, False)],
        [(1, 16, 4, True)],
    ]
    driver.drain()
    driver.check_everyone_finished()


# ---- live changes -------------------------------------------------------------------------


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_live_switch_loses_nobody(policy: str) -> None:
    driver = Driver(config(lookahead=True, num_blocks=16))
    for number in range(10):
        driver.submit(request(number, prompt=5 + number, output=12, tenant="ab"[number % 2]))
    for _ in range(5):
        driver.answer()
    driver.send(Reconfigure({"scheduling.policy": policy, "scheduling.token_budget": 5}))
    for _ in range(5):
        driver.answer()
    driver.send(Reconfigure({"policy": "sarathi", "slo.tbt_ms": 50, "slo.ttft_ms": None}))
    assert driver.core.config.tbt_s == 0.05
    driver.drain()
    driver.check_everyone_finished()


@pytest.mark.parametrize(
    "changes",
    [
        {"scheduling.policy": "nonsense"},
        {"num_blocks": 1},
        {"policy": "vllm", "policy_options": {"nonsense": 1}},
        {"policy_options": {"chunks": "nonsense"}},
        {"order": "nonsense"},
        {"token_budget": "many"},
        {"max_requests": 9},  # the stages were built for 8
        {"budget": "nonsense"},
        {"budget": "fixed", "budget_options": {"nonsense": 1}},
        {"admission": "nonsense"},
        {"order_options": {"nonsense": 1}},
    ],
)
def test_a_bad_change_is_refused_whole(changes: dict[str, Any]) -> None:
    core = build_core(config())
    before = core.config, core.policy
    with pytest.raises(ConfigError) as caught:
        core.handle(Reconfigure(changes), 0.0)
    assert caught.value.key in {key.removeprefix("scheduling.") for key in changes}
    assert (core.config, core.policy) == before
    core.validate()


def test_places_may_be_lowered_and_raised_again_but_not_beyond_what_was_built() -> None:
    driver = Driver(config(max_requests=4))
    for number in range(12):
        driver.submit(request(number, output=6))
    driver.answer()
    assert driver.core.residents.num_residents == 4
    driver.send(Reconfigure({"scheduling.max_requests": 1}))
    assert driver.core.residents.num_residents == 4  # nobody is thrown out
    while driver.core.residents.num_residents > 1:
        driver.answer()
    for _ in range(3):
        driver.answer()
        assert driver.core.residents.num_residents <= 1
    for too_many in (5, 1000):
        with pytest.raises(ConfigError, match="max_requests: the stages were built for 4"):
            driver.core.handle(Reconfigure({"max_requests": too_many}), driver.now_s)
    driver.send(Reconfigure({"max_requests": 4}))
    driver.answer()
    assert driver.core.residents.num_residents == 4
    driver.drain()
    driver.check_everyone_finished()


def test_options_belong_to_the_part_they_were_written_for() -> None:
    core = build_core(config(policy="mlfq", order_options={"quantum_tokens": 4}))
    core.handle(Reconfigure({"policy": "orca", "policy_options": {"max_batch": 2}}), 0.0)
    assert core.config.order_options == {}
    core.handle(Reconfigure({"policy": "fair"}), 0.1)
    assert core.config.policy_options == {}
