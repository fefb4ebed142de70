"""What an engine publishes: its outlook says what its quotes say."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from actors.fleet.fleet import Fleet
from actors.fleet.publish import KNOTS, Publisher
from actors.fleet.routers import build_router
from actors.fleet.snapshot import Arrival, EngineState, Outlook, short_digests
from actors.scheduling.admission.predictive import PredictiveAdmission
from actors.scheduling.build import build_core
from actors.scheduling.config import SchedulerConfig
from actors.scheduling.cost.model import CostModel
from actors.scheduling.cost.online import OnlineCostModel
from actors.scheduling.events import Execute, StepDone, Submit, Tick
from actors.scheduling.interfaces import QuoteRequest
from actors.scheduling.plan import StepResult
from actors.scheduling.request import Request, SamplingParams
from actors.scheduling.state import prefix_digests
from tests.actors.fleet.pictures import BITS
from tests.actors.scheduling.driver import Driver
from tests.actors.scheduling.modeled import modeled

MODEL = CostModel(
    "m", ((1, 0.010), (32, 0.010), (2048, 0.200)), decode_kv_s=1e-8, kv_tokens=60_000,
    max_model_len=4096,
)  # fmt: skip
ADAPTIVE = modeled(MODEL, budget="adaptive", tbt_s=0.1, ttft_s=1.0)


def test_the_outlook_says_what_a_quote_says() -> None:
    core = build_core(ADAPTIVE, cost_model=OnlineCostModel(MODEL))
    for index in range(20):
        request = Request(index, (0,) * 900, SamplingParams(50), 0.0)
        core.handle(Submit(request), 0.001 * index)
    said = Publisher("a", BITS, core).snapshot(0.02, EngineState.SERVING, num_received=20)
    assert (said.num_running + said.num_waiting, said.num_received) == (20, 20)
    assert 0 < said.num_prefill_tokens <= 20 * 900
    assert not said.shares_kv
    for num_tokens in (1, *KNOTS[1:3], 600, 2000):
        quote = core.quote(QuoteRequest(num_tokens, 50), 0.02)
        ttft_s, promised_s = said.outlook.at(num_tokens)
        assert ttft_s == pytest.approx(quote.ttft_s, rel=0.05)
        assert promised_s >= ttft_s
        assert (promised_s <= 1.0) == (quote.ttft_bound_s is not None and quote.ttft_bound_s <= 0.9)
    quote = core.quote(QuoteRequest(500, 50), 0.02)
    assert said.outlook.tbt_with_s(500) == pytest.approx(quote.tbt_bound_s, rel=0.05)


def test_a_forecast_is_the_same_alone_and_beside_others() -> None:
    """What several forecasts have in common is worked out once, for every state of the engine."""
    core = build_core(ADAPTIVE, cost_model=OnlineCostModel(MODEL))
    admission = PredictiveAdmission.build(ADAPTIVE, OnlineCostModel(MODEL))
    now_s = 0.0
    for index in range(120):
        now_s += 0.013
        core.handle(Submit(Request(index, (0,) * (7 * index + 1), SamplingParams(30), 0.0)), now_s)
        if index % 3:
            for instruction in core.handle(Tick(), now_s):
                if isinstance(instruction, Execute):
                    plan = instruction.plan
                    tokens = tuple((piece[0], 0) for piece in plan.slices if piece[3])
                    core.handle(StepDone(StepResult(plan.step_id, tokens)), now_s)
        there = admission.predictor.situation(core.view, now_s)
        for num_tokens in KNOTS[:4]:
            asked = Request(-1, (0,) * num_tokens, SamplingParams(1), 0.0)
            alone = admission.forecast(asked, core.view, now_s)
            assert admission.forecast(asked, core.view, now_s, there) == alone


def test_without_an_objective_there_is_no_least_slack() -> None:
    core = build_core(modeled(MODEL), cost_model=OnlineCostModel(MODEL))
    said = Publisher("a", BITS, core).snapshot(0.0)
    assert said.least_slack_s == math.inf
    assert said.outlook.points


@pytest.mark.parametrize("num_stages", [1, 2])
def test_the_outlook_knows_what_more_streams_will_cost(num_stages: int) -> None:
    """A step takes 1 ms, 0.1 ms a stream and 1 us a token of context."""
    model = CostModel(
        "m", ((1, 0.0011), (2048, 0.2058)), decode_kv_s=1e-6, kv_tokens=60_000,
        max_model_len=4096, num_stages=num_stages,
    )  # fmt: skip
    settings = modeled(model, budget="adaptive", tbt_s=0.1, ttft_s=1.0)
    driver = Driver(settings, build_core(settings, cost_model=OnlineCostModel(model)))
    publisher = Publisher("a", BITS, driver.core)

    def begin(first: int, count: int) -> tuple[Outlook, float, int]:
        """Begin streams; the outlook, the slack and the tokens of context once all decode."""
        for number in range(first, first + count):
            driver.submit(Request(number, (1,) * 300, SamplingParams(200), 0.0))
        while len(driver.core.view.decoding) < first + count:
            driver.answer()
        said = publisher.snapshot(driver.now_s)
        return said.outlook, said.least_slack_s, said.num_decode_tokens

    few, few_slack_s, few_tokens = begin(0, 8)
    many, many_slack_s, many_tokens = begin(8, 16)
    more = (many_tokens - few_tokens, 16)
    assert many.tbt_s - few.tbt_s > 0.001 / num_stages
    longer_s = few.tbt_with_s(*more) - few.tbt_s
    assert longer_s == pytest.approx(many.tbt_s - few.tbt_s, rel=0.05)
    assert few.tbt_s - many.tbt_s == pytest.approx(many_slack_s - few_slack_s)
    assert few.lone_tbt_s == pytest.approx(many.lone_tbt_s, rel=0.02)
    assert few.lone_tbt_s < few.tbt_s


class Engines:
    """Cores of a model with layers that keep states, and a front's view of them."""

    def __init__(self, count: int, num_blocks: int = 64, num_saved_states: int = 4) -> None:
        config = SchedulerConfig(
            num_blocks=num_blocks, block_size=4, max_model_len=48, max_step_tokens=128,
            token_budget=8, budget="fixed", num_saved_states=num_saved_states, swap="never",
            drafter="none",
        )  # fmt: skip
        self.drivers = {name: Driver(config) for name in "ab"[:count]}
        self.publishers = {name: Publisher(name, BITS, d.core) for name, d in self.drivers.items()}
        self.fleet, self.now_s, self.number = Fleet(), 0.0, 0
        for publisher in self.publishers.values():
            self.fleet.published(publisher.snapshot(0.0))

    def arrival(self, prompt: tuple[int, ...]) -> Arrival:
        digests = short_digests(prefix_digests(prompt[:-1], 4))
        return Arrival(len(prompt), 4, prefix=digests)

    def run(self, name: str, prompt: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """The prompt's tokens that were found there, and the prompt with its answer."""
        self.number += 1
        self.fleet.sent(name, self.arrival(prompt))
        driver = self.drivers[name]
        driver.submit(Request(self.number, prompt, SamplingParams(3, seed=self.number), 0.0))
        driver.drain()
        first = driver.callers[self.number].first
        assert first is not None
        return first.num_cached_tokens, (*prompt, *driver.callers[self.number].tokens)

    def publish(self) -> None:
        for publisher in self.publishers.values():
            if (update := publisher.prefix_update()) is not None:
                self.fleet.update_prefixes(update)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 14)), min_size=1, max_size=12),
    st.sampled_from([8, 12, 64]),
    st.integers(0, 3),
)
@example([(0, 1), (0, 1), (0, 6), (0, 5), (1, 7), (0, 1)], 8, 2)  # blocks computed a second time
@example([(0, 1), (0, 1), (0, 1), (0, 1)], 8, 1)  # a state that finds no row
def test_what_fronts_hear_of_states_is_what_prompts_then_find(
    turns: list[tuple[int, int]], num_blocks: int, num_saved_states: int
) -> None:
    """Of conversations in turns that evict each other's blocks and states."""
    engines = Engines(1, num_blocks, num_saved_states)
    texts: dict[int, tuple[int, ...]] = {}
    for talk, length in turns:
        prompt = (*texts.get(talk, ()), *[10 * talk + i % 7 for i in range(length)])
        if len(prompt) + 3 > min(48, 4 * num_blocks):
            continue
        engines.publish()
        told = engines.fleet.num_cached_tokens(engines.arrival(prompt)).get("a", 0)
        found, texts[talk] = engines.run("a", prompt)
        assert told == found


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 14), st.integers(0, 6)), min_size=1, max_size=12
    ),
    st.sampled_from([12, 16, 64]),
    st.integers(1, 4),
)
@example([(1, 5, 0), (1, 7, 0), (0, 1, 0)], 12, 1)  # the first to share is evicted beside others
def test_a_state_that_fronts_hear_of_is_behind_blocks_that_are_there(
    turns: list[tuple[int, int, int]], num_blocks: int, num_saved_states: int
) -> None:
    """Of requests that share a beginning and run beside each other."""
    engines = Engines(1, num_blocks, num_saved_states)
    driver, listening = engines.drivers["a"], Fleet()  # without what is expected of requests sent
    listening.published(engines.publishers["a"].snapshot(0.0))
    prompts: list[tuple[int, ...]] = []
    for number, (talk, length, num_answers) in enumerate(turns):
        begin = tuple(range(12)) if talk < 4 else ()
        prompts.append((*begin, *[talk + i // 5 for i in range(length)]))
        driver.submit(Request(number, prompts[-1], SamplingParams(1 + 2 * talk), 0.0))
        last = number == len(turns) - 1
        while driver.outstanding and (last or num_answers):
            num_answers -= 1
            driver.answer()
            if (update := engines.publishers["a"].prefix_update()) is not None:
                listening.update_prefixes(update)
            late = Fleet()  # of a front that connects now
            late.published(engines.publishers["a"].snapshot(0.0))
            late.update_prefixes(engines.publishers["a"].prefixes())
            manager = driver.core.requests.running.block_manager
            for prompt in prompts:
                found = {"a": 4 * len(manager.match(prefix_digests(prompt[:-1], 4)))}
                told = listening.num_cached_tokens(engines.arrival(prompt))
                assert {"a": 0, **told} == found
                assert late.num_cached_tokens(engines.arrival(prompt)) == told


def test_a_conversation_goes_to_the_engine_that_has_its_states() -> None:
    engines, router = Engines(2), build_router("slack")
    _, first = engines.run("b", tuple(range(22)))
    assert engines.run("a", tuple(range(40, 48)))[0] == 0
    second = engines.arrival((*first, 7, 8))

    def chosen() -> tuple[str, int]:
        there = router.choose(second, engines.fleet, 0.0)
        assert there is not None
        return there.engine_id, there.num_cached_tokens

    assert chosen() == ("b", 20), "as expected of what was sent there"
    engines.publish()
    assert chosen() == ("b", 20), "as the engine says"
    # Blocks alone are no beginning: the same prompt, cut within what it has computed.
    assert engines.fleet.num_cached_tokens(engines.arrival(tuple(range(17)))) == {}
    engines.fleet.unsent("b", second.prefix)
    assert chosen() == ("b", 20), "what the engine has confirmed stays"
    assert engines.run("b", (*first, 7, 8))[0] == 20
    late = Fleet()  # of a front that connects now
    for publisher in engines.publishers.values():
        late.published(publisher.snapshot(0.0))
        late.update_prefixes(publisher.prefixes())
    engines.publish()
    assert late.num_cached_tokens(second) == engines.fleet.num_cached_tokens(second) == {"b": 24}
