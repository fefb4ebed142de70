"""Early tokens buy time for later ones, never more than the smoothness bound."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from statistics import median
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.scheduling.budgets.slack import (
    INITIAL_SHARE,
    MOST_SHARE,
    KeptShare,
    Slack,
    due_after,
)
from actors.scheduling.build import build_core
from actors.scheduling.cost.model import CostModel
from actors.scheduling.cost.online import OnlineCostModel
from actors.scheduling.request import Objective, Request, SamplingParams
from actors.scheduling.state import RequestState
from tests.actors.scheduling.exact_stages import TOKEN, ExactStages
from tests.actors.scheduling.modeled import modeled


def test_at_smoothness_one_every_gap_is_bounded() -> None:
    assert due_after(10.1, 10.02, 0.1, 1.0) == pytest.approx(10.12)


def test_early_tokens_bank_time_up_to_the_bound() -> None:
    due_s = due_after(0.1, 0.02, 0.1, 2.0)
    assert due_s == pytest.approx(0.2)  # the schedule: second token at 2 objectives
    for now_s in (0.04, 0.06, 0.08, 0.10):
        due_s = due_after(due_s, now_s, 0.1, 2.0)
    assert due_s == pytest.approx(0.30)  # 5 tokens early, but no gap over 2 objectives


def test_a_stall_is_not_paid_for_by_the_rest() -> None:
    assert due_after(0.1, 5.0, 0.1, 2.0) == pytest.approx(5.1)


@given(st.lists(st.floats(0.0, 3.0), max_size=40), st.floats(1.0, 4.0))
def test_due_times_keep_both_bounds(gaps: list[float], smoothness: float) -> None:
    now_s, due_s = 0.0, 1.0
    for gap in gaps:
        now_s += gap
        due_s = due_after(due_s, now_s, 1.0, smoothness)
        assert now_s + 1.0 - 1e-9 <= due_s <= now_s + smoothness + 1e-9


def test_one_miss_in_a_hundred_and_thirty_leaves_the_share_where_it_is() -> None:
    kept = KeptShare(allowed=0.0075, value=0.9)
    for step in range(1330):
        kept.note(step % 133 != 0, taken=1.1)
    assert kept.value == pytest.approx(0.9, rel=0.01)
    for _ in range(100):
        kept.note(False, taken=1.1)
    assert kept.value == kept.least


def test_misses_lower_the_aim_and_time_raises_it() -> None:
    kept = KeptShare(allowed=0.0075)
    for number in range(20_000):
        kept.note(number % 100 != 0, taken=1.1)  # one in a hundred: more than is allowed
    assert kept.value < 1.02 * kept.least
    for number in range(200_000):
        kept.note(number % 400 != 0, taken=1.1)
    assert kept.value > 0.97


def test_one_bad_second_is_forgiven_and_lasting_misses_are_not() -> None:
    kept = KeptShare(allowed=0.002, forgives=True)
    for _ in range(40):  # forty steps in a row, far over what any share would have saved
        kept.note(False, taken=2.0)
    assert kept.value == INITIAL_SHARE
    for _ in range(40):  # and forty that a smaller share would have saved
        kept.note(False, taken=1.1)
    assert INITIAL_SHARE * (1 - kept.rate) ** 3 <= kept.value < INITIAL_SHARE
    for number in range(20_000):  # one in fifty, of a program that goes on
        kept.note(number % 50 != 0, taken=1.01)
    assert kept.value < 1.02 * kept.least
    num_steps = 0
    while kept.value < INITIAL_SHARE:
        kept.note(True, taken=0.5)
        num_steps += 1
    plain = KeptShare(allowed=0.002, value=kept.least)
    for _ in range(num_steps):
        plain.note(True, taken=0.5)
    assert plain.value < kept.least + (INITIAL_SHARE - kept.least) / 3


@pytest.mark.parametrize(("forgives", "most"), [(True, MOST_SHARE), (False, 1.0)])
def test_after_many_kept_steps_a_part_of_the_objective_is_left(forgives: bool, most: float) -> None:
    kept = KeptShare(allowed=0.0075, forgives=forgives)
    for _ in range(2000):
        kept.note(True, taken=0.5)
    assert kept.value == most


def test_a_kept_share_that_does_not_forgive_counts_every_miss() -> None:
    kept = KeptShare(allowed=0.002)
    for _ in range(5):
        kept.note(False, taken=2.0)
    assert kept.value == pytest.approx(INITIAL_SHARE * (1 - kept.rate) ** 5)


@pytest.mark.parametrize("forgives", [True, False])
def test_what_was_gained_beyond_the_first_share_is_for_a_queue(forgives: bool) -> None:
    kept = KeptShare(allowed=0.002, forgives=forgives)
    for _ in range(5000):
        kept.note(True, taken=0.5)
    assert kept.value == kept.for_queue(1) > 1.05 * INITIAL_SHARE
    assert kept.for_queue(0) == (INITIAL_SHARE if forgives else kept.value)
    for _ in range(500):
        kept.note(False, taken=1.0)
    assert kept.for_queue(0) == kept.for_queue(1) == kept.value == kept.least


def test_a_decode_left_out_counts_with_what_it_computes_again() -> None:
    """Of four known tokens, as where the last slice had a wrong draft."""
    slack = Slack(OnlineCostModel(_linear(1)), tbt_s=0.1, max_step_tokens=64)
    state = RequestState(Request(1, (1, 2, 3), SamplingParams(9), 0.0, output=(4, 5, 6, 7)), 1, 64)
    state.num_computed_tokens = 3
    slack._leave_out(state, due_s=1.0, now_s=0.0)
    assert (slack._left_out.num_slices, slack._left_out.prefill_tokens) == (1, 4)


# ---- steps that take as long as predicted --------------------------------------------------

ARRIVAL_S = 1.0  # of the prompts
_EVERYTHING = {  # of every objective may be used, however little the longest steps gain
    "first_share": 1.0, "headroom": 0.0, "miss_cost": 0.0, "allowed_misses": 0.0,
    "efficiency": 1.0, "ease": 1.0, "pace": 0.0,
}  # fmt: skip


def _linear(num_stages: int) -> CostModel:
    return CostModel(
        "linear", ((1, 0.003), (2001, 0.203)), num_stages=num_stages, decode_kv_s=1e-7,
        transfer_s=((1, 0.001), (2, 0.001)), kv_tokens=64_000, max_model_len=4096,
    )  # fmt: skip


def _gaps_beside_prompts(
    num_stages: int,
    objectives_s: Sequence[float],
    late_s: float = 0.0,
    smoothness: float = 1.0,
    settings: Mapping[str, object] = MappingProxyType({}),
    num_streams: int = 12,
) -> dict[float, list[list[float]]]:
    """By objective: the gaps of each stream, as shares of it, while long prompts are computed."""
    model = _linear(num_stages)
    config = modeled(
        model, budget="adaptive", budget_options={**_EVERYTHING, "smoothness": smoothness},
        tbt_s=0.06, max_step_tokens=4096, delivery_s=0.0, **settings,
    )  # fmt: skip
    core = build_core(config, cost_model=OnlineCostModel(model))
    own_s = [objectives_s[number % len(objectives_s)] for number in range(num_streams)]
    requests = [
        Request(
            number, (1,) * (20 + 37 * number), SamplingParams(3500), 0.02 * number,
            objective=Objective(tbt_s=tbt_s),
        )
        for number, tbt_s in enumerate(own_s)
    ]  # fmt: skip
    requests += [Request(n, (2,) * 3000, SamplingParams(1), ARRIVAL_S) for n in (98, 99)]
    stages = ExactStages(core, model, requests, late_s)
    while 99 not in stages.came_s:
        stages.advance()
    gaps: dict[float, list[list[float]]] = {tbt_s: [] for tbt_s in objectives_s}
    for number, tbt_s in enumerate(own_s):
        beside = sorted({at_s for at_s in stages.came_s[number] if at_s > ARRIVAL_S})
        gaps[tbt_s].append([(after - before) / tbt_s for before, after in pairwise(beside)])
    return gaps


@pytest.mark.parametrize(
    ("num_stages", "objectives_s", "late_s", "settings"),
    [
        (1, (0.06,), 0.0, {}),
        (1, (0.06,), 0.004, {}),
        (1, (0.06, 0.045), 0.0, {"lookahead": True}),
        (2, (0.06,), 0.0, {}),
        (2, (0.06, 0.045), 0.0, {}),
        (2, (0.06,), 0.0, {"micro_batches": "uniform"}),
        (3, (0.06,), 0.0, {}),
        (3, (0.09, 0.06), 0.0, {}),
    ],
)
def test_where_steps_take_as_long_as_predicted_gaps_are_as_long_as_allowed(
    num_stages: int, objectives_s: tuple[float, ...], late_s: float, settings: dict[str, object]
) -> None:
    """No longer, and hardly shorter: prompts get all the time that the streams do not need."""
    gaps = _gaps_beside_prompts(num_stages, objectives_s, late_s, 1.0, settings)
    tightest = [gap for stream in gaps[min(objectives_s)] for gap in stream]
    assert max(gap for streams in gaps.values() for stream in streams for gap in stream) < 1.001
    assert median(tightest) > 0.99


@pytest.mark.parametrize(
    ("num_stages", "objectives_s"), [(2, (0.06,)), (2, (0.2, 0.03)), (3, (0.2, 0.05, 0.2))]
)
def test_a_step_leaves_time_for_the_streams_of_other_micro_batches(
    num_stages: int, objectives_s: tuple[float, ...]
) -> None:
    """Each stream is a micro-batch of its own; where there are too few, prompts are beside them."""
    gaps = _gaps_beside_prompts(num_stages, objectives_s, num_streams=len(objectives_s))
    tightest = [gap for stream in gaps[min(objectives_s)] for gap in stream]
    assert max(tightest) < 1.001
    assert median(tightest) > 0.9


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_a_longer_gap_uses_what_earlier_tokens_saved(num_stages: int) -> None:
    for stream in _gaps_beside_prompts(num_stages, (0.06,), smoothness=2.0)[0.06]:
        assert 1.9 < max(stream) < 2.001
        behind = [total - number for number, total in enumerate(accumulate(stream), start=1)]
        assert max(behind) < 1.001  # what was saved before


def _serve(
    model: CostModel, micro_batches: str, smoothness: float, seed: int
) -> tuple[list[Request], dict[int, list[float]]]:
    """Prompts and streams of many lengths and objectives, and when their tokens come."""
    chance, requests, arrival_s = random.Random(seed), list[Request](), 0.0
    for number in range(25):
        arrival_s += chance.expovariate(15)
        prompt, sampling = chance.choice([5, 40, 300, 1500]), chance.choice([5, 40, 100])
        goal = Objective(tbt_s=chance.choice([None, None, 0.045, 0.15]))
        request = Request(
            number, (number,) * prompt, SamplingParams(sampling), arrival_s, objective=goal
        )
        requests.append(request)
    config = modeled(
        model, budget="adaptive", budget_options={**_EVERYTHING, "smoothness": smoothness},
        tbt_s=0.06, max_step_tokens=4096, delivery_s=0.0, micro_batches=micro_batches,
        drafter="none",
    )  # fmt: skip
    stages = ExactStages(build_core(config, cost_model=OnlineCostModel(model)), model, requests)
    while stages.is_busy:
        stages.advance()
    return requests, stages.came_s


@pytest.mark.parametrize(
    ("num_stages", "micro_batches", "smoothness", "most"),
    [
        (2, "greedy", 1.0, 0.001),
        (4, "greedy", 1.0, 0.001),
        (2, "uniform", 1.0, 0.15),
        (4, "uniform", 1.0, 0.15),
        (3, "greedy", 2.0, 0.001),
        (4, "greedy", 2.0, 0.001),
        (4, "uniform", 2.0, 0.15),
    ],
)
def test_whatever_comes_no_token_is_much_later_than_due(
    num_stages: int, micro_batches: str, smoothness: float, most: float
) -> None:
    """Also of a stream for which a step has no place, as it holds a part of the decodes. How they
    share the steps after it is not known."""
    for seed in range(2):
        requests, came_s = _serve(_linear(num_stages), micro_batches, smoothness, seed)
        for request in requests:
            tbt_s = request.objective.tbt_s or 0.06
            first_s, *later_s = came_s[request.request_id]
            due_s = first_s + tbt_s
            for at_s in later_s:
                assert at_s < due_s + most * tbt_s
                due_s = due_after(due_s, at_s, tbt_s, smoothness)


@pytest.mark.parametrize("num_streams", [2, 4])
def test_steps_of_few_streams_become_shorter_where_answers_are_late(num_streams: int) -> None:
    """Also those in which every stream's token is followed by drafts. Answers are later by more
    than is planned for."""
    model = CostModel("slow", ((1, 0.011), (2001, 2.011)), kv_tokens=64_000, max_model_len=4096)
    config = modeled(
        model, budget="adaptive", tbt_s=0.06, max_step_tokens=4096, delivery_s=0.0,
        budget_options={"first_share": 1.0, "headroom": 0.0}, drafter="lookup", lookahead=True,
    )  # fmt: skip
    core = build_core(config, cost_model=OnlineCostModel(model))
    streams = [Request(n, (TOKEN,) * 50, SamplingParams(4000), 0.0) for n in range(num_streams)]
    prompts = [Request(n, (2,) * 25, SamplingParams(1), 0.05 * n) for n in range(10, 110)]
    stages = ExactStages(core, model, [*streams, *prompts], late_s=0.012)
    while 109 not in stages.came_s:
        stages.advance()
    assert core.speculation.num_drafts > 100
    times = [at_s for at_s in stages.came_s[0] if at_s > ARRIVAL_S]
    assert sum([after - before > 0.0601 for before, after in pairwise(times)]) < 12


@pytest.mark.parametrize("smoothness", [1.0, 2.0])
def test_decodes_attend_to_no_more_than_the_window(smoothness: float) -> None:
    """Those of other steps, and of prompts that wait, take as long as if each had a fixed cost."""
    second, model = 2**-9, replace(_linear(2), decode_kv_s=0.0)
    windowed = replace(model, decode_kv_s=second, attention_window=1)
    assert _serve(windowed, "uniform", smoothness, 0) == _serve(
        replace(model, decode_slice_s=second), "uniform", smoothness, 0
    )
