"""A recorded life replayed gives the same plans; rows survive being stored as text."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.engine.event_recorder import read_events
from actors.scheduling.build import build_core
from actors.scheduling.config import SchedulerConfig
from actors.scheduling.event_log import (
    Recorder,
    ReplayMismatch,
    check_replay,
    config_of,
    config_row,
    from_row,
    to_row,
)
from actors.scheduling.events import (
    Abort,
    AdapterLoads,
    Emit,
    Output,
    PipelineLost,
    Reconfigure,
    Refuse,
    StepDone,
    StepFailed,
    Submit,
    Tick,
    WakeAt,
)
from actors.scheduling.plan import StepResult, TokenLogprobs
from actors.scheduling.policies import POLICIES
from actors.scheduling.request import FinishReason, Grammar, Objective, Request, SamplingParams
from tests.actors.scheduling.driver import Driver

FULL_REQUEST = Request(
    7,
    (1, 2, 3),
    SamplingParams(
        5,
        temperature=0.7,
        stop_token_ids=(1, 2),
        logit_bias=((3, -1.5), (4, 100.0)),
        logprobs=2,
        grammar=Grammar("regex", "a+é"),
    ),
    12.25,
    output=(9,),
    tenant="t",
    priority=-1,
    objective=Objective(tbt_s=0.1),
    group="g",
    pooling="mean",
    cache_salt="s",
)


@pytest.mark.parametrize(
    "event",
    [
        Submit(FULL_REQUEST),
        Abort(3),
        StepDone(
            StepResult(
                4,
                ((7, 1),),
                logprobs=((7, TokenLogprobs(1, -0.125, 1, ((1, -0.125), (2, -2.5)))),),
                prompt_logprobs=((7, 1, (TokenLogprobs(2, -1.0, 3, ()),)),),
                pooled=((8, (0.1, 1e-30)),),
                stage_times_s=((0.1, 0.30000000000000004), (0.4, 0.5)),
            )
        ),
        StepFailed(1, "why"),
        PipelineLost((), steps_are_suspect=False, first_dropped=3),
        Reconfigure({"policy": "vllm", "policy_options": {"max_batched_tokens": 64}}),
        Tick(),
    ],
    ids=lambda event: type(event).__name__,
)
def test_events_survive_as_text(event: object) -> None:
    instructions = [
        Emit((Output(1, 0, (5,), FinishReason.STOP, 3, error="x"),)),
        Refuse(2, "no", param="prompt", retry_after_s=0.5),
        WakeAt(0.1 + 0.2),
    ]
    row = json.loads(json.dumps(to_row(0.1, event, instructions)))  # type: ignore[arg-type]
    now_s, restored, answers = from_row(row)
    assert (now_s, restored, answers) == (0.1, event, instructions)
    assert type(restored) is type(event)


def test_configuration_survives_as_text() -> None:
    config = SchedulerConfig(
        9, policy="sarathi", policy_options={"chunks": "dynamic"}, tbt_s=0.1, max_chunk=3
    )
    assert config_of(json.loads(json.dumps(config_row(config)))) == config


def test_a_log_that_names_no_drafter_had_none() -> None:
    """Earlier versions left out fields at their default, which was none."""
    row = config_row(SchedulerConfig(9, drafter="auto"))
    assert config_of(row).drafter == "auto"
    settings = json.loads(row["event"])
    del settings["drafter"]
    assert config_of({**row, "event": json.dumps(settings)}).drafter == "none"


def random_life(config: SchedulerConfig, seed: int) -> Driver:
    """A driver after some hundred random events, failures included."""
    chance = random.Random(seed)
    driver = Driver(config)
    for number in range(120):
        kind = chance.random()
        if kind < 0.3:
            prompt = tuple(i % 3 for i in range(chance.randint(1, 30)))
            sampling = SamplingParams(chance.randint(1, 9), seed=number, stop_token_ids=(4,))
            request = Request(number, prompt, sampling, driver.now_s, tenant=chance.choice("ab"))
            driver.submit(replace(request, group="g" if chance.random() < 0.1 else None))
        elif kind < 0.36:
            driver.abort(chance.randrange(number + 1))
        elif kind < 0.4 and driver.outstanding and len(driver.outstanding[0].slices) > 1:
            driver.fail(applied=True)
        elif driver.outstanding:
            driver.answer()
    driver.drain()
    return driver


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_replay_gives_identical_instructions(policy: str) -> None:
    config = SchedulerConfig(
        num_blocks=10,
        num_host_blocks=6,
        block_size=4,
        max_requests=6,
        max_model_len=40,
        max_step_tokens=24,
        token_budget=9,
        swap="always",
        policy=policy,
    )
    driver = random_life(config, seed=sum(map(ord, policy)))
    rows = [config_row(config), *(to_row(*call) for call in driver.log)]
    assert check_replay(json.loads(json.dumps(rows))) == len(rows)
    assert driver.core.num_steps > 50


def test_a_recorder_writes_what_replays() -> None:
    rows: list[dict[str, object]] = []
    recorder = Recorder(build_core(SchedulerConfig(num_blocks=8)), rows.append)
    recorder.handle(Submit(Request(1, (1, 2), SamplingParams(2), 0.0)), 0.0)
    recorder.handle(StepDone(StepResult(0, ((1, 5),))), 0.1)
    assert check_replay(rows) == 3


def test_a_difference_is_found() -> None:
    config = SchedulerConfig(num_blocks=14, block_size=4, max_model_len=40, token_budget=9)
    driver = random_life(config, seed=1)
    rows = [config_row(config), *(to_row(*call) for call in driver.log)]
    other = build_core(replace(config, token_budget=8))
    with pytest.raises(ReplayMismatch) as caught:
        check_replay(rows, other)
    assert 0 < caught.value.row < len(rows)


@pytest.mark.parametrize("name", ["one_stage_every_policy", "two_stages"])
def test_a_live_log_of_another_version_replays_plan_for_plan(name: str) -> None:
    """Recorded from live engines: one on 2026-11-22 (commit 88bb856), switched through the
    policies; one of two stages with uniform micro-batches on 2026-11-28 (commit 2bc02226)."""
    file = Path(__file__).with_name("recorded") / f"{name}.parquet"
    rows = read_events(file)
    assert check_replay(rows) == len(rows) > 100


def test_a_log_of_an_earlier_version_names_further_tokens_otherwise() -> None:
    event = StepDone(StepResult(3, ((1, 5),), extra_tokens=((1, (6, 7)),)))
    row = to_row(0.5, event, ())
    assert "extra_tokens" in row["event"]
    earlier = {**row, "event": row["event"].replace("extra_tokens", "further")}
    assert from_row(earlier) == (0.5, event, [])


def test_a_log_of_another_version_is_named_as_such() -> None:
    submit = Submit(Request(1, (1, 2), SamplingParams(2), 0.0))
    settings, row = config_row(SchedulerConfig(num_blocks=8)), to_row(0.5, submit, ())
    added = {**settings, "event": settings["event"].replace('"num_blocks"', '"new_setting"')}
    message = "the log is of another version: unknown 'new_setting' in SchedulerConfig"
    with pytest.raises(ValueError, match=message):
        check_replay([added, row])
    for other, unknown in (
        ({**row, "kind": "NewEvent"}, "unknown 'NewEvent' in events"),
        ({**row, "event": row["event"].replace('"prompt"', '"prompts"')}, "unknown 'prompts' in R"),
        ({**row, "instructions": '[["NewOne",{}]]'}, "unknown 'NewOne' in instructions"),
    ):
        with pytest.raises(ValueError, match=unknown):
            check_replay([settings, other])


def test_a_log_of_an_earlier_version_names_the_time_for_loads_otherwise() -> None:
    rows: list[dict[str, Any]] = []
    recorder = Recorder(build_core(SchedulerConfig(num_blocks=8)), rows.append)
    recorder.handle(AdapterLoads(1), 0.0)
    recorder.handle(Submit(Request(1, (1, 2), SamplingParams(2), 0.0)), 0.0)
    written = rows[-1]["instructions"]
    assert '"adapter_load_s":' in written
    rows[-1]["instructions"] = written.replace("adapter_load_s", "load_s")
    assert check_replay(rows) == len(rows)
