"""The peak of KV tokens to come, counted right."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.scheduling.admission.peak import Places, peak_kv_tokens
from actors.scheduling.cost.model import CostModel
from actors.scheduling.lifecycle import LiveRequests
from actors.scheduling.request import Request, SamplingParams
from tests.actors.scheduling.driver import Driver
from tests.actors.scheduling.modeled import modeled


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 30)), min_size=1, max_size=8))
def test_peak_equals_a_walk_step_by_step(requests: list[tuple[int, int]]) -> None:
    peak, step = 0, 0
    while True:
        held = [now + step for now, left in requests if left >= step]
        if not held:
            break
        peak = max(peak, sum(held))
        step += 1
    assert peak_kv_tokens(requests) == peak


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 30)), min_size=1, max_size=8),
    st.integers(1, 40),
)
def test_a_shared_prefix_never_counts_too_little(
    requests: list[tuple[int, int]], prefix: int
) -> None:
    peak, step = 0, 0
    while True:
        held = [now + step for now, left in requests if left >= step]
        if not held:
            break
        peak = max(peak, prefix + sum(held))
        step += 1
    whole = [(prefix + now, left) for now, left in requests]
    assert peak <= peak_kv_tokens(whole, prefix * (len(requests) - 1)) <= peak_kv_tokens(whole)


_SIZES = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), max_size=8)


@given(_SIZES, _SIZES, st.integers(60, 150), st.integers(1, 8))
def test_places_are_found_as_in_a_walk_step_by_step(
    running: list[tuple[int, int]], queue: list[tuple[int, int]], capacity: int, most: int
) -> None:
    """Each starts in the first step in which the peak fits and a slot is free."""
    places, step = Places(running[:most], capacity, most), 0
    there = [(now, left) for now, left in running[:most]]
    for tokens, output in queue:
        while there and (
            len(there) == most or peak_kv_tokens([*there, (tokens, output)]) > capacity
        ):
            step += 1
            there = [(now + 1, left - 1) for now, left in there if left > 1]
        there.append((tokens, output))
        assert places.when(tokens, output)[0] == step
        places.add(tokens, output)


def test_one_that_ends_before_the_peak_leaves_no_room_at_it() -> None:
    """So a long one waits for a long one, and a short one may start before that."""
    places = Places([(10, 5), (10, 100), (10, 100)], 225, 4)
    assert places.when(20, 60) == (0, 20)
    assert places.when(20, 70) == places.when(20, 100) == (100, 20)


def test_several_taken_as_one_start_together() -> None:
    places = Places([(10, 5), (10, 20)], 120, 4)
    assert places.when(20, 10, 3) == (5, 60)
    places.add(20, 10, 3)
    assert places.when(20, 10) == (15, 20)


def test_the_unused_half_of_a_block_counts_while_it_is_held() -> None:
    assert peak_kv_tokens([(10, 5), (10, 100)], unused=8) == 118


def test_requests_that_share_and_end_soon_save_nothing_for_others() -> None:
    others, soon = [(300, 1000)] * 8, [(1520, 20)] * 12
    assert peak_kv_tokens([*others, *soon], 11 * 1500) == peak_kv_tokens(others) == 8 * 1300


@pytest.mark.heavy
@pytest.mark.parametrize("admission", ["predicted_peak", "predictive"])
def test_requests_that_share_a_prompt_run_together(admission: str) -> None:
    """Of 10,000 tokens their prompt takes 2000, and each then at most 420 of its own."""
    model = CostModel("m", ((1, 0.010), (2048, 0.200)), kv_tokens=10_000, max_model_len=4096)
    driver = Driver(
        modeled(model, admission=admission, ttft_s=30.0, prefix_cache=True, token_budget=512)
    )
    for number in range(14):
        tokens = (7,) * 2000 + (number,) * 20
        driver.submit(Request(number, tokens, SamplingParams(400), driver.now_s))
        for _ in range(4):
            driver.answer()
    for _ in range(20):
        driver.answer()
    assert driver.core.requests.running.num_requests == 14
    assert not any(caller.refused for caller in driver.callers.values())
    driver.drain()
    assert driver.core.num_preemptions == 0


def test_what_a_request_shares_is_asked_for_only_where_it_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = CostModel("m", ((1, 0.010), (2048, 0.200)), kv_tokens=10_000, max_model_len=8192)
    driver = Driver(modeled(model, admission="predicted_peak", prefix_cache=True, token_budget=512))
    asked: list[int] = []
    num_held_of = LiveRequests.num_held_of

    def counted(requests: LiveRequests, request_id: int) -> int:
        asked.append(request_id)
        return num_held_of(requests, request_id)

    monkeypatch.setattr(LiveRequests, "num_held_of", counted)
    # It fits, fits by none of its own tokens, and fits only if others hold enough of them.
    for number, (num_prompt, most) in enumerate([(4000, 1000), (100, 100), (100, 8000), (6000, 9)]):
        driver.submit(Request(number, (number,) * num_prompt, SamplingParams(most), driver.now_s))
        for _ in range(12):
            driver.answer()
        if number == 2:
            driver.abort(number)
    assert set(asked) == {3}
