"""Steps launched before their tokens are known on the host give the tokens of steps that wait."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed: the GPU backends need it")

from actors.scheduling.events import Abort, Submit
from actors.scheduling.plan import StepPlan, StepResult
from actors.scheduling.request import Grammar, Request, SamplingParams
from actors.stage.cuda.graphs import StepGraphs
from actors.stage.cuda.run_ahead import RunAhead
from actors.stage.host_batch import HostBatch
from actors.stage.landing import Landing
from actors.stage.runner import StageRunner
from actors.stage.step_inputs import GraphSize, StepInputs
from tests.actors.stage.greedy_reference import make_prompts
from tests.actors.stage.mini_planner import make_runner
from tests.gpu.ahead_engine import LENGTHS, Engine, requests
from tests.gpu.captures import EagerCapture
from tests.gpu.two_layers import expected

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="interpreted kernels; see test_gpu_stage"
)
TOKENS = 6
SPEC = {"max_requests": 4, "graph_tokens": 16, "max_model_len": 64}


@pytest.fixture
def make(tiny_model: Callable[..., Path]) -> Callable[..., StageRunner]:
    def make(num_blocks: int = 256, num_host_blocks: int = 0) -> StageRunner:
        folder = tiny_model("llama")
        runner = make_runner(folder, num_blocks, num_host_blocks, backend="triton", **SPEC)
        runner.capture(EagerCapture())
        return runner

    return make


@pytest.fixture
def runner(make: Callable[[], StageRunner]) -> StageRunner:
    return make()


def test_tokens_of_transformers(runner: StageRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    steps_with_unknown_tokens = []
    run = StepGraphs.run

    def watched(self: StepGraphs, host: HostBatch, *rest: Any) -> object:
        steps_with_unknown_tokens.append(bool((host.tokens_T < 0).any()))
        return run(self, host, *rest)

    monkeypatch.setattr(StepGraphs, "run", watched)
    engine = Engine(runner)
    for request in requests([SamplingParams(TOKENS)] * 3):
        engine.send(Submit(request))
    engine.finish()
    wanted = [answer[:TOKENS] for answer in expected("llama", LENGTHS)]
    assert [engine.outputs[i] for i in range(3)] == wanted
    assert sum(steps_with_unknown_tokens) >= 4


def test_steps_that_fail_ahead_of_their_turn_lose_no_blocks(
    runner: StageRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill, failed = StepInputs.fill, []

    def failing(
        self: StepInputs, size: GraphSize, host: HostBatch, *rest: Any, **more: Any
    ) -> None:
        fill(self, size, host, *rest, **more)
        if (host.tokens_T < 0).any():
            failed.append(host)
            raise RuntimeError("out of memory")

    monkeypatch.setattr(StepInputs, "fill", failing)
    engine = Engine(runner)
    for request in requests([SamplingParams(TOKENS)] * 3):
        engine.send(Submit(request))
    engine.finish()
    assert len(failed) >= 4
    wanted = [answer[:TOKENS] for answer in expected("llama", LENGTHS)]
    assert [engine.outputs[i] for i in range(3)] == wanted


@pytest.mark.long
def test_requests_that_ask_for_more_hold_none_back(
    make: Callable[[], StageRunner], tiny_model: Callable[..., Path]
) -> None:
    """Penalties, log-probabilities and grammars of some rows: steps are launched ahead with all of
    them in it, and the draws are those of plain torch, which waits."""
    digits = Grammar("regex", r"[a-c]{2}\d{9}")
    sampling = [
        SamplingParams(TOKENS, temperature=0.8, seed=1, presence_penalty=1.0, logprobs=1),
        SamplingParams(TOKENS, temperature=0.9, seed=2),
        SamplingParams(TOKENS, temperature=1.0, seed=3, grammar=digits, logprobs=2),
    ]
    engines = []
    for runner, lookahead in (
        (make(), True),
        (make_runner(tiny_model("llama"), max_requests=4, max_model_len=64), False),
    ):
        engine = Engine(runner, lookahead=lookahead)
        for request in requests(sampling):
            engine.send(Submit(request))
        engine.finish()
        engines.append(engine)
    ahead, waiting = engines
    assert ahead.outputs == waiting.outputs
    assert len(ahead.ahead) >= TOKENS
    assert not waiting.ahead
    assert ahead.logprobs.keys() == waiting.logprobs.keys() == {0, 2}
    pairs = [
        pair
        for request_id in (0, 2)
        for pair in zip(ahead.logprobs[request_id], waiting.logprobs[request_id], strict=True)
    ]
    assert len(pairs) == 2 * TOKENS
    for ours, theirs in pairs:
        assert ours.token == theirs.token
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [t for t, _ in ours.top] == [t for t, _ in theirs.top]


@pytest.mark.long
def test_a_plan_that_comes_while_tokens_are_on_their_way_is_still_launched(
    runner: StageRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler answers a step's result some hundred microseconds after it was sent: the device
    still computes then, and so looks are taken until the tokens have landed."""
    looks_until_landed, plan_at = 5, 3
    is_done = Landing.is_done
    looks = {"seen": 0, "landings": 0}

    def slowly(landing: Landing) -> bool:
        looks["landings"] += 1
        return looks["landings"] % looks_until_landed == 0 and is_done(landing)

    monkeypatch.setattr(Landing, "is_done", slowly)
    engine = Engine(runner)
    plan_of = engine.following

    def late(wait_s: float) -> StepPlan | None:
        looks["seen"] += 1
        assert wait_s <= 0.001, "no look may outlast a step"
        return plan_of(wait_s) if looks["seen"] % plan_at == 0 else None

    monkeypatch.setattr(engine, "following", late)
    for request in requests([SamplingParams(TOKENS)] * 3):
        engine.send(Submit(request))
    engine.finish()
    wanted = [answer[:TOKENS] for answer in expected("llama", LENGTHS)]
    assert [engine.outputs[i] for i in range(3)] == wanted
    assert len(engine.ahead) >= 4


@pytest.mark.long
def test_steps_with_swaps_are_launched_ahead(
    make: Callable[..., StageRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks leave and return behind the step that runs, and what they hold is what it wrote."""
    launched: list[StepPlan] = []
    launch = RunAhead._launch

    def noted(self: RunAhead, plan: StepPlan, *rest: Any) -> None:
        launch(self, plan, *rest)
        if self._launched is not None:
            launched.append(plan)

    monkeypatch.setattr(RunAhead, "_launch", noted)
    wanted = requests([SamplingParams(12)] * len(LENGTHS))
    alone = Engine(make(), lookahead=False).answer(wanted)
    assert not launched
    # Of 4 positions each: two of the three requests at their ends.
    few = {"num_blocks": 10, "num_host_blocks": 32, "swap": "always"}
    assert Engine(make(10, 32), **few).answer(wanted) == alone
    assert any(plan.swap_out for plan in launched)
    assert any(plan.swap_in for plan in launched)


@pytest.mark.long
def test_an_aborted_request_leaves_the_others_alone(runner: StageRunner) -> None:
    engine = Engine(runner)
    for request in requests([SamplingParams(TOKENS)] * 3):
        engine.send(Submit(request))
    for _ in range(4):
        engine.step()
    engine.send(Abort(1))
    late = Request(9, tuple(make_prompts(LENGTHS)[2]), SamplingParams(TOKENS), engine.now_s)
    engine.send(Submit(late))
    engine.finish()
    wanted = [answer[:TOKENS] for answer in expected("llama", LENGTHS)]
    assert engine.outputs[0] == wanted[0]
    assert engine.outputs[2] == engine.outputs[9] == wanted[2]


def test_a_bad_plan_fails_in_its_own_turn(runner: StageRunner) -> None:
    engine = Engine(runner)
    engine.send(Submit(requests([SamplingParams(TOKENS)] * 3)[0]))
    plan = engine.plans.popleft()
    bad = StepPlan(99, (plan.named_slices[0]._replace(request_id=77),))
    result = runner.execute(plan, None, lambda wait_s: bad)
    assert isinstance(result, StepResult)
    with pytest.raises(KeyError, match="request 77"):
        runner.execute(bad, None)


def test_a_launch_ahead_that_fails_fails_no_other_step(
    runner: StageRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its error: the requests of the step that runs did not cause it."""
    failed: list[int] = []
    run = StepGraphs.run

    def failing(self: StepGraphs, host: HostBatch, *rest: Any) -> Any:
        if (host.tokens_T < 0).any():
            failed.append(host.num_tokens)
            raise RuntimeError("out of memory")
        return run(self, host, *rest)

    monkeypatch.setattr(StepGraphs, "run", failing)
    engine = Engine(runner)
    for request in requests([SamplingParams(TOKENS)] * 3):
        engine.send(Submit(request))
    engine.finish()
    assert failed
    wanted = [answer[:TOKENS] for answer in expected("llama", LENGTHS)]
    assert [engine.outputs[i] for i in range(3)] == wanted


def test_a_step_launched_ahead_and_not_wanted_is_dropped(runner: StageRunner) -> None:
    engine = Engine(runner)
    for request in requests([SamplingParams(TOKENS)] * 3):
        engine.send(Submit(request))
    engine.step()
    while engine.ahead[-1:] != [engine.plans[0].step_id]:
        engine.step()
    fresh = Engine(runner)  # its step ids and request ids begin anew
    for request in requests([SamplingParams(TOKENS)] * 3):
        fresh.send(Submit(request))
    fresh.finish()
    wanted = [answer[:TOKENS] for answer in expected("llama", LENGTHS)]
    assert [fresh.outputs[i] for i in range(3)] == wanted
