"""No request starves: how late a request may come and still start before one that waits, by policy.

A flood of short, urgent requests of other tenants meets one long request (the victim). What
arrives after it and starts before it is an overtaker; each order promises a bound on those.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.events import Reconfigure
from actors.scheduling.policies import POLICIES, build_policy
from actors.scheduling.request import Objective, Request, SamplingParams
from tests.actors.scheduling.driver import Driver

VICTIM = 0
PROMISE_S, PATIENCE_S, PROMOTE_S, AGEING = 1.0, 0.5, 1.0, 20.0
OPTIONS: dict[str, dict[str, Any]] = {
    "deadline": {"default_ttft_s": PROMISE_S, "patience_s": PATIENCE_S},
    "mlfq": {"promote_s": PROMOTE_S, "quantum_tokens": 4},
    "priority": {"ageing_s": 0.5},
    "shortest": {"ageing_tokens_per_s": AGEING},
}
# Seconds after the victim's arrival in which an overtaker must have arrived, by order.
BOUND_S = {
    "fcfs": 0.0,
    "shortest": 24 / AGEING,  # the victim's output, in seconds of ageing
    "priority": 2 * 0.5,  # the flood is two classes better
    "mlfq": PROMOTE_S,  # then it is at the top level, and there by order of arrival
    "deadline": PROMISE_S + PATIENCE_S,  # its promise is lost, then its patience
}
PLACES, LONGEST_OUTPUT, LONGEST_PROMPT = 3, 24, 36
ONE_EVENT_S = 0.011

arrivals = st.lists(
    st.tuples(st.integers(1, 12), st.integers(1, 6), st.sampled_from("xyz"), st.integers(0, 3)),
    min_size=5,
    max_size=40,
)


def build(policy: str, order: str, budget: int, num_stages: int) -> Driver:
    config = SchedulerConfig(
        num_blocks=24, block_size=4, max_requests=PLACES, max_model_len=64, max_step_tokens=64,
        token_budget=budget, policy=policy, order=order, num_stages=num_stages,
    )  # fmt: skip
    if order == "auto":
        order = build_policy(config).order
    return Driver(replace(config, order=order, order_options=OPTIONS.get(order, {})))


@pytest.mark.parametrize(
    ("policy", "order"), [*((p, "auto") for p in sorted(POLICIES)), ("sarathi", "priority")]
)
@settings(max_examples=1 + settings().max_examples // 20)
@given(
    flood=arrivals,
    before=st.integers(0, 10),
    budget=st.sampled_from([4, 8, 32]),
    num_stages=st.sampled_from([1, 2]),
)
def test_overtaking_is_bounded(
    policy: str,
    order: str,
    flood: list[tuple[int, int, str, int]],
    before: int,
    budget: int,
    num_stages: int,
) -> None:
    driver = build(policy, order, budget, num_stages)
    order = driver.config.order
    started_s: dict[int, float] = {}
    seen = 0

    def note() -> None:
        nonlocal seen
        for plan in driver.plans[seen:]:
            for entry in plan.started:
                started_s.setdefault(entry.request_id, driver.now_s)
        seen = len(driver.plans)

    def submit(number: int, prompt: int, output: int, tenant: str, ttft_s: float | None) -> None:
        objective = Objective(ttft_s=ttft_s)
        sampling = SamplingParams(output, seed=number)
        driver.submit(
            Request(
                number,
                tuple(range(prompt)),
                sampling,
                driver.now_s,
                tenant=tenant,
                priority=2 * (number != VICTIM),
                objective=objective,
            )
        )
        note()

    number = 0
    while VICTIM not in started_s:
        if number == before:
            submit(VICTIM, LONGEST_PROMPT, LONGEST_OUTPUT, "victim", None)
        number += 1
        assert number < 2000, "starved"
        prompt, output, tenant, busy = flood[number % len(flood)]
        submit(number, prompt, output, tenant, 0.3)
        for _ in range(busy):
            if driver.outstanding:
                driver.answer()
                note()
        while driver.core.requests.num_waiting > 6 and driver.outstanding:
            driver.answer()
            note()
    victim = driver.callers[VICTIM].request
    overtakers = [
        driver.callers[i].request
        for i, at_s in started_s.items()
        if i > before and at_s < started_s[VICTIM]
    ]
    if order == "fair":  # Sheng et al.: no other tenant is served 2 U more while the victim waits
        bound = 2 * max(LONGEST_PROMPT, PLACES * LONGEST_OUTPUT * 2)
        for tenant in "xyz":
            assert sum(len(r.prompt) for r in overtakers if r.tenant == tenant) <= bound
    else:
        latest_s = victim.arrival_s + BOUND_S[order] + ONE_EVENT_S
        assert all(r.arrival_s <= latest_s for r in overtakers)
        assert order != "fcfs" or not overtakers
    driver.drain()
    driver.check_everyone_finished()


@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=6),
    spare=st.integers(1, 30),
    num_streams=st.integers(1, 8),
    block_size=st.sampled_from([1, 4, 16]),
    lookahead=st.booleans(),
    max_chunk=st.sampled_from([None, 3]),
)
def test_no_prompt_of_any_length_stalls_a_stream_under_sarathi(
    lengths: list[int],
    spare: int,
    num_streams: int,
    block_size: int,
    lookahead: bool,
    max_chunk: int | None,
) -> None:
    """Every step holds a token of every stream, and no chunk exceeds what the budget leaves."""
    driver = Driver(
        SchedulerConfig(
            num_blocks=4000 // block_size,
            block_size=block_size,
            max_requests=16,
            max_model_len=256,
            max_step_tokens=256,
            token_budget=num_streams + spare,
            lookahead=lookahead,
            max_chunk=max_chunk,
        )
    )
    streams = set(range(num_streams))
    for number in streams:
        driver.submit(Request(number, (1, 2), SamplingParams(200, seed=number), 0.0))
    while {s.request_id for s in driver.core.requests.decoding} != streams:
        driver.answer()
    before = len(driver.plans)
    for number, length in enumerate(lengths, start=100):
        driver.submit(Request(number, (3,) * length, SamplingParams(2), driver.now_s))
        driver.answer()
    for _ in range(20):
        driver.answer()
    for plan in driver.plans[before:]:
        assert streams <= {part.request_id for part in plan.named_slices}
        chunks = sum(p.num_tokens for p in plan.named_slices if p.request_id not in streams)
        decodes = sum(p.samples and p.start > 0 and p.num_tokens == 1 for p in plan.named_slices)
        assert chunks <= max(spare, decodes - num_streams)


def _flood(driver: Driver, victim: int, steps: int, **request: Any) -> bool:
    """Whether the victim moved on while short requests came without end."""
    number = max(1000, *driver.callers)
    state = driver.core.requests.by_id[victim]
    before = (state.num_tokens, state.num_computed_tokens)
    for _ in range(steps):
        while driver.core.requests.num_waiting < 4:
            number += 1
            request.setdefault("sampling", SamplingParams(30, seed=number))
            driver.submit(Request(number, (1, 2, 3), arrival_s=driver.now_s, **request))
        driver.answer()
        if (state.num_tokens, state.num_computed_tokens) > before:
            return True
    return False


WIDE: dict[str, Any] = {"num_blocks": 2000, "block_size": 4, "max_model_len": 512}
WIDE |= {"max_step_tokens": 64, "token_budget": 64, "prefix_cache": False}


@pytest.mark.parametrize("policy", ["hybrid_only", "orca", "vllm", "faster_transformer"])
def test_a_prompt_begun_by_another_policy_goes_on_under_whole_prompts(policy: str) -> None:
    driver = Driver(SchedulerConfig(**WIDE, max_requests=12))
    for number in range(1, 9):
        driver.submit(Request(number, (1, 2, 3), SamplingParams(300, seed=number), driver.now_s))
    while len(driver.core.requests.decoding) < 8:
        driver.answer()
    driver.submit(Request(0, tuple(i % 7 for i in range(119)), SamplingParams(4), driver.now_s))
    while driver.core.requests.by_id[0].num_computed_tokens == 0:
        driver.answer()
    driver.send(Reconfigure({"policy": policy}))
    for _ in range(2):
        driver.answer()
    state = driver.core.requests.by_id[0]
    assert state.num_output_tokens or _flood(driver, 0, 200)


def test_a_long_prompt_of_small_dynamic_chunks_goes_on_beside_any_number_of_decodes() -> None:
    options = {"chunks": "dynamic", "low": 16, "high": 64, "num_sizes": 4, "span": 64}
    driver = Driver(SchedulerConfig(**WIDE, max_requests=40, policy_options=options))
    for number in range(1, 31):
        driver.submit(Request(number, (1, 2, 3), SamplingParams(300, seed=number), driver.now_s))
    while len(driver.core.requests.decoding) < 30:
        driver.answer()
    driver.submit(Request(0, (5,) * 300, SamplingParams(4), driver.now_s))
    while driver.core.requests.by_id[0].num_output_tokens == 0:
        assert _flood(driver, 0, 20)


def test_a_relegated_prompt_is_preempted_once_at_most() -> None:
    driver = Driver(
        SchedulerConfig(
            num_blocks=20, block_size=4, max_requests=4, max_model_len=80, max_step_tokens=64,
            token_budget=6, policy="deadline", allocation="chunk", watermark=0.0,
            prefix_cache=False, order_options={"default_ttft_s": 0.01, "patience_s": 1.0},
        )
    )  # fmt: skip
    kind: dict[str, Any] = {"objective": Objective(ttft_s=60.0), "sampling": SamplingParams(45)}
    for number in range(1, 5):
        driver.submit(Request(number, (1, 2, 3, 4), arrival_s=driver.now_s, **kind))
    driver.submit(Request(0, tuple(range(60)), SamplingParams(5), driver.now_s))
    state = driver.core.requests.by_id[0]
    for _ in range(600):
        if not state.num_output_tokens:
            _flood(driver, 0, 1, **kind)
    assert state.num_output_tokens
    assert state.num_preemptions <= 1


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_none_starves_under_a_flood(policy: str) -> None:
    """One long request among an endless stream of short, urgent ones still ends."""
    options = {"mlfq": {"promote_s": 2.0}, "deadline": {"default_ttft_s": 10.0}}
    config = SchedulerConfig(
        num_blocks=16,
        block_size=4,
        max_requests=4,
        max_model_len=64,
        max_step_tokens=64,
        token_budget=8,
        policy=policy,
        order_options=options.get(policy, {}),
    )
    driver = Driver(config)
    driver.submit(Request(0, tuple(range(40)), SamplingParams(20), 0.0, tenant="long"))
    for number in range(1, 1500):
        sampling = SamplingParams(3, seed=number)
        objective = Objective(ttft_s=5.0)
        driver.submit(
            Request(number, (1, 2, 3), sampling, driver.now_s, tenant="x", objective=objective)
        )
        while driver.core.requests.num_waiting > 3 and driver.outstanding:
            driver.answer()
        if driver.callers[0].finish is not None:
            break
    assert driver.callers[0].finish is not None, "starved"
    driver.drain()
