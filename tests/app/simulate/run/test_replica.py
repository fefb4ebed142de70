"""One replica on virtual time: times that can be worked out by hand, and the core unchanged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from actors.scheduling.build import build_core
from actors.scheduling.cost.model import CostModel
from actors.scheduling.events import Emit, Execute, StepDone, Submit
from actors.scheduling.plan import StepResult
from actors.scheduling.request import Request, SamplingParams
from actors.scheduling.validation import validate
from app.simulate.run.simulation import Deployment, scheduler_config, simulate
from app.simulate.workload.arrivals import fixed_interval
from app.simulate.workload.lengths import fixed_lengths
from app.simulate.workload.requests import Workload, generate, multi_turn

# A step takes 10 ms plus 1 ms a token; nothing else costs anything.
PLAIN = CostModel("plain", ((1, 0.011), (1000, 1.010)), kv_tokens=16_000, max_model_len=1024)


def workload(*rows: tuple[float, int, int]) -> Workload:
    arrivals, prompts, outputs = zip(*rows, strict=True)
    return Workload(np.array(arrivals, float), np.array(prompts), np.array(outputs))


def test_one_request_takes_what_its_steps_take() -> None:
    deployment = Deployment(scheduler_config(PLAIN, token_budget=64), PLAIN)
    result = simulate(workload((1.0, 100, 3)), deployment)
    # 64 tokens: 74 ms; 36 tokens: 46 ms, which gives the first token; then 11 ms each.
    assert result.record.started_s == [1.0]
    assert result.record.first_token_s[0] == pytest.approx(1.120)
    assert list(result.record.gaps_s) == pytest.approx([0.011, 0.011])
    assert result.record.finished_s[0] == pytest.approx(1.142)
    summary = result.summary()
    assert summary.ttft_p50 == pytest.approx(0.120)
    assert summary.num_steps == 4
    assert summary.mean_step_s == pytest.approx(0.142 / 4)


def test_a_long_prompt_stalls_decodes_under_orca_and_not_under_sarathi() -> None:
    traffic = workload((0.0, 10, 40), (0.2, 500, 2))
    longest = {}
    for policy in ("orca", "sarathi"):
        config = scheduler_config(PLAIN, policy=policy, token_budget=32)
        longest[policy] = max(simulate(traffic, Deployment(config, PLAIN)).record.gaps_s)
    assert longest["orca"] > 0.5
    assert longest["sarathi"] <= 0.010 + 0.032 + 1e-9


def test_two_stages_overlap_two_micro_batches() -> None:
    staged = CostModel(
        "staged", ((1, 0.010), (64, 0.010)), num_stages=2, transfer_s=((1, 0.001),),
        kv_tokens=16_000, max_model_len=1024,
    )  # fmt: skip
    config = scheduler_config(staged, token_budget=64)
    alone = simulate(workload((0.0, 10, 5)), Deployment(config, staged))
    # A token walks two stages and one send, and cannot start before the last one is known.
    assert list(alone.record.gaps_s) == pytest.approx([0.021] * 4)
    both = simulate(workload((0.0, 10, 50), (0.005, 10, 50)), Deployment(config, staged))
    # Two requests in two micro-batches hide behind each other almost entirely.
    assert both.record.end_s < 1.1 * 50 * 0.021
    assert 0.0 < both.summary().bubble_share < 0.2


STATES = replace(PLAIN, state_tokens=200)


@pytest.mark.parametrize("model", [PLAIN, STATES], ids=["plain", "states"])
def test_the_core_hears_only_what_a_live_one_hears(model: CostModel) -> None:
    """Replaying the simulator's events into a fresh core gives identical plans."""
    config = scheduler_config(model, token_budget=48, prefix_cache=model is STATES)
    seen: list[tuple[object, float, list[object]]] = []
    traffic = generate(fixed_interval(12.0), fixed_lengths(60, 9), 30)
    if model is STATES:
        traffic = multi_turn(2.0, 4.0, fixed_lengths(61, 9), 8, think_s=9.0, max_total=400)
    deployment = Deployment(config, model)

    import app.simulate.run.replica as run_module

    def recording_core(*args: object, **options: object) -> object:
        core = build_core(*args, **options)  # type: ignore[arg-type]
        original = core.handle

        def handle(event: object, now_s: float) -> list[object]:
            out = original(event, now_s)  # type: ignore[arg-type]
            seen.append((event, now_s, list(out)))
            return list(out)

        core.handle = handle  # type: ignore[method-assign,assignment]
        return core

    monkey = pytest.MonkeyPatch()
    monkey.setattr(run_module, "build_core", recording_core)
    try:
        simulate(traffic, deployment)
    finally:
        monkey.undo()
    from actors.scheduling.cost.online import read_cost_model

    fresh = build_core(config, cost_model=read_cost_model(config.cost_model))
    for event, now_s, out in seen:
        assert fresh.handle(event, now_s) == out  # type: ignore[arg-type]
    validate(fresh)
    assert fresh.is_idle
    if model is STATES:
        assert (config.max_requests, config.num_saved_states) == (40, 40)
        rows = [i.outputs for _, _, out in seen for i in out if isinstance(i, Emit)]
        first = {o.request_id: o.num_cached_tokens for row in rows for o in row if not o.index}
        # A turn begins where the last one's prompt, before answer and question, left its states;
        # unless an impatient user speaks before it is computed.
        lasts = np.maximum(traffic.shared_tokens - 10, 0) // 16 * 16
        found = np.array([first[number] for number in range(len(lasts))])
        later = lasts > 0
        assert (found[later] == lasts[later]).mean() > 0.8
        assert not found[~later].any()


def test_noise_is_seeded() -> None:
    config = scheduler_config(PLAIN, token_budget=64)
    traffic = generate(fixed_interval(5.0), fixed_lengths(50, 5), 20)
    runs = [
        list(simulate(traffic, Deployment(config, PLAIN, jitter=0.1), seed=s).record.gaps_s)
        for s in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]


def test_a_hand_driven_core_gives_the_simulated_times() -> None:
    """The same core driven by hand, step by step, on the same arithmetic."""
    config = scheduler_config(PLAIN, token_budget=64)
    core = build_core(config)
    request = Request(0, (0,) * 100, SamplingParams(max_tokens=3, min_tokens=3), 0.0)
    now_s, finished_s = 0.0, None
    out = core.handle(Submit(request), now_s)
    while finished_s is None:
        plan = next(i.plan for i in out if isinstance(i, Execute))
        now_s += 0.010 + 0.001 * plan.num_tokens
        tokens = tuple((s.request_id, 0) for s in plan.named_slices if s.samples)
        out = core.handle(StepDone(StepResult(plan.step_id, tokens)), now_s)
        for instruction in out:
            if isinstance(instruction, Emit) and instruction.outputs[-1].finish_reason:
                finished_s = now_s
    simulated = simulate(workload((0.0, 100, 3)), Deployment(config, PLAIN))
    assert simulated.record.finished_s[0] == pytest.approx(finished_s)
