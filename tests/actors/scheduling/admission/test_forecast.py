"""Where steps take as long as the cost model says, first tokens come when they are predicted."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from actors.scheduling.admission.forecast import Predictor
from actors.scheduling.build import build_core
from actors.scheduling.cost.model import CostModel
from actors.scheduling.cost.online import OnlineCostModel
from actors.scheduling.request import Request, SamplingParams
from tests.actors.scheduling.exact_stages import ExactStages
from tests.actors.scheduling.modeled import modeled

MODEL = CostModel(
    "linear", ((1, 0.003), (2001, 0.203)), decode_kv_s=1e-7, kv_tokens=64_000, max_model_len=4096
)
NOW_S = 1.0


@pytest.mark.parametrize("drafter", ["none", "lookup"])
@pytest.mark.parametrize("budget", ["auto", "fixed"])
@pytest.mark.parametrize(
    ("num_streams", "max_tokens", "num_prompts"),
    [(0, 1, 0), (0, 1, 3), (1, 600, 3), (8, 600, 0), (8, 600, 3), (20, 150, 4)],
)
def test_a_first_token_comes_when_it_is_predicted(
    num_streams: int, max_tokens: int, num_prompts: int, budget: str, drafter: str
) -> None:
    """Behind prompts that came just before, which a step that runs may have begun or not; also
    where all places are taken."""
    config = modeled(
        MODEL, budget=budget, token_budget=256 if budget == "fixed" else None, drafter=drafter,
        max_requests=20, tbt_s=0.06, max_step_tokens=4096,
    )  # fmt: skip
    core = build_core(config, cost_model=(cost := OnlineCostModel(MODEL)))
    requests = [
        Request(number, (1,) * (60 + number), SamplingParams(max_tokens), 0.02 * number)
        for number in range(num_streams)
    ]
    requests += [
        Request(100 + number, (2,) * 1500, SamplingParams(60), NOW_S - 0.001)
        for number in range(num_prompts)
    ]
    requests.append(Request(999, (3,) * 1000, SamplingParams(2), NOW_S))
    stages = ExactStages(core, MODEL, requests)
    while stages.next_s < NOW_S:
        stages.advance()
    predictor = Predictor.build(config, cost)
    predicted_s = max(predictor.waits_s(1000, 2, predictor.situation(core.view, NOW_S)))
    while 999 not in stages.came_s:
        stages.advance()
    assert 0.85 < predicted_s / (stages.came_s[999][0] - NOW_S) < 1.05


@pytest.mark.parametrize("admission", ["all", "predictive"])
@pytest.mark.parametrize("budget", ["auto", "fixed"])
def test_contexts_beyond_a_sliding_window_cost_nothing(admission: str, budget: str) -> None:
    """Streams of long contexts start beside each other, and first tokens come when predicted."""
    model = replace(MODEL, decode_kv_s=2e-6, attention_window=256)
    config = modeled(
        model, budget=budget, token_budget=256 if budget == "fixed" else None, drafter="none",
        tbt_s=0.06, max_step_tokens=4096, admission=admission,
    )  # fmt: skip
    core = build_core(config, cost_model=(cost := OnlineCostModel(model)))
    requests = [Request(n, (1,) * 2500, SamplingParams(1500), 0.4 * n) for n in range(14)]
    requests.append(Request(999, (3,) * 1000, SamplingParams(2), 10.0))
    stages = ExactStages(core, model, requests)
    while stages.next_s < 10.0:
        stages.advance()
    assert len(core.view.decoding) == 14
    predictor = Predictor.build(config, cost)
    predicted_s = max(predictor.waits_s(1000, 2, predictor.situation(core.view, 10.0)))
    while 999 not in stages.came_s:
        stages.advance()
    assert 0.8 < predicted_s / (stages.came_s[999][0] - 10.0) < 1.05
    gaps = [after - before for n in range(14) for before, after in pairwise(stages.came_s[n])]
    assert max(gaps) < 0.06


@pytest.mark.parametrize(
    ("places", "prompt", "outputs", "ttft_s"),
    [
        ({"max_requests": 16}, 300, (300,), 6.0),
        ({"max_requests": 16, "num_stages": 2}, 300, (300,), 6.0),
        ({"num_blocks": 600}, 150, (200, 300), 4.0),
    ],
)
def test_who_is_accepted_behind_several_rounds_of_streams_has_its_first_token_in_time(
    places: dict[str, int], prompt: int, outputs: tuple[int, ...], ttft_s: float
) -> None:
    """Sequence slots or memory are taken, and many come at once. What runs is nearly done at times,
    and those that take its place are not; they need memory for their outputs, too."""
    took_s = _first_tokens_s(places, prompt, outputs, ttft_s)
    assert 40 < len(took_s) < 140
    assert sum([each_s > ttft_s for each_s in took_s]) < 0.03 * len(took_s)
    assert max(took_s) > 0.7 * ttft_s


@pytest.mark.parametrize(
    ("num_stages", "num_blocks", "outputs", "ttft_s"),
    [(3, 600, (50, 100, 400), 4.0), (4, 600, (10, 600), 4.0), (4, 1000, (50, 100, 400), 6.0)],
)
def test_short_streams_that_end_make_no_room_for_a_long_one(
    num_stages: int, num_blocks: int, outputs: tuple[int, ...], ttft_s: float
) -> None:
    """Most memory is used when the long ones end, by then the short ones have ended anyway."""
    places = {"num_stages": num_stages, "num_blocks": num_blocks}
    took_s = _first_tokens_s(places, 150, outputs, ttft_s)
    assert 60 < len(took_s) < 140
    assert sum([each_s > ttft_s for each_s in took_s]) < 0.02 * len(took_s)


def _first_tokens_s(
    places: dict[str, int], prompt: int, outputs: tuple[int, ...], ttft_s: float
) -> list[float]:
    """Of those that are accepted."""
    model = replace(MODEL, num_stages=places.get("num_stages", 1))
    config = modeled(
        model, budget="auto", drafter="none", tbt_s=0.06, ttft_s=ttft_s, max_step_tokens=2048,
        admission="predictive", **places,
    )  # fmt: skip
    core = build_core(config, cost_model=OnlineCostModel(model))
    chance, requests, arrival_s = random.Random(1), list[Request](), 0.0
    for number in range(150):
        arrival_s += chance.expovariate(30.0)
        sampling = SamplingParams(chance.choice(outputs))
        requests.append(Request(number, (number + 1,) * prompt, sampling, arrival_s))
    stages = ExactStages(core, model, requests)
    while stages.is_busy:
        stages.advance()
    return [stages.came_s[n][0] - requests[n].arrival_s for n in stages.came_s]


def test_the_predicted_rate_follows_no_single_step() -> None:
    """Steps end at tile edges, and some hold no prompt: refusals must not hang on the last one."""
    tiles = [
        (n + edge, 0.012 + 0.028 * (n // 512)) for n in range(0, 2048, 512) for edge in (1, 512)
    ]
    model = CostModel(
        "tiled", tuple(tiles), decode_kv_s=1.5e-6, kv_tokens=400_000, max_model_len=4096
    )
    config = modeled(model, budget="adaptive", drafter="none", tbt_s=0.1, max_step_tokens=2048)
    core = build_core(config, cost_model=(cost := OnlineCostModel(model)))
    chance, requests = random.Random(1), list[Request]()
    for number in range(300):
        prompt, sampling = (1,) * chance.randint(300, 2500), SamplingParams(chance.randint(50, 400))
        requests.append(Request(number, prompt, sampling, 0.05 * number))
    stages, predictor = ExactStages(core, model, requests), Predictor.build(config, cost)
    rates: dict[int, float] = {}  # by the step in flight
    while stages.next_s < 20.0:
        stages.advance()
        if stages.next_s > 4.0 and core.view.in_flight:
            rates[core.view.in_flight[0].plan.step_id] = predictor.prefill_rate(core.view)
    changes = [abs(after / before - 1.0) for before, after in pairwise(rates.values())]
    assert len(changes) > 50
    assert max(changes) < 0.2


def test_one_of_a_group_computes_the_prompt_for_all() -> None:
    """Before second tokens, eight that share a prompt are as much prefill as one."""

    def pace_s(number: int) -> float:
        config = modeled(MODEL, drafter="none", tbt_s=0.5, max_step_tokens=4096)
        core = build_core(config, cost_model=(cost := OnlineCostModel(MODEL)))
        requests = [Request(0, (1,) * 10, SamplingParams(600), 0.0)]
        requests += [
            Request(1 + n, (2,) * 3000, SamplingParams(60), 0.001, group="n > 1")
            for n in range(number)
        ]
        stages = ExactStages(core, MODEL, requests)
        while 0 not in stages.came_s:
            stages.advance()
        assert len(core.view.decoding) == 1
        assert core.view.decoding[0].num_output_tokens == 1
        return Predictor.build(config, cost).pace_s(core.view)

    assert pace_s(8) == pytest.approx(pace_s(1), rel=0.01)
