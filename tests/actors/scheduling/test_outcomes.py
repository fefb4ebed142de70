"""Ends of every kind: aborts, late tokens, pooling, replays, failed steps and lost pipelines."""

from __future__ import annotations

from typing import Any

import pytest

from actors.scheduling.build import build_core
from actors.scheduling.events import (
    PLAIN_FIELDS,
    Abort,
    Emit,
    PipelineLost,
    StepDone,
    Submit,
    Tick,
)
from actors.scheduling.plan import DEAD_END, NOT_FINITE, SLOW_GRAMMAR, StepResult, TokenLogprobs
from actors.scheduling.request import (
    ALLOWS_NOTHING,
    TAKES_TOO_LONG,
    FinishReason,
    Grammar,
    Request,
    SamplingParams,
)
from actors.scheduling.statistics import statistics
from tests.actors.scheduling.driver import Driver
from tests.actors.scheduling.short_lives import config, request


def test_abort_works_in_every_state() -> None:
    driver = Driver(config(lookahead=True, max_requests=2))
    for number in range(1, 5):
        driver.submit(request(number, prompt=6, output=20))
    for _ in range(4):
        driver.answer()
    states = driver.core.requests.by_id
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


def test_an_idle_engine_computes_no_tokens_a_second_whatever_it_did_before() -> None:
    driver = Driver(config())
    driver.submit(request(1, prompt=6, output=20))
    for _ in range(4):
        driver.answer()
    assert statistics(driver.core)["tokens_per_s"] > 0
    driver.drain()
    assert statistics(driver.core)["tokens_per_s"] == 0
    assert driver.core.requests.tokens_per_s > 0, "a refusal's retry_after_s goes by it"


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


def test_a_token_without_other_data_is_a_plain_row_also_where_a_block_is_full() -> None:
    core = build_core(config(block_size=4, prefix_cache=True))
    core.handle(Submit(request(1, prompt=5, output=9)), 0.0)
    state, rows = core.requests.by_id[1], []
    for step in range(9):
        emit, *_ = core.handle(StepDone(StepResult(step, ((1, 7),))), 0.1 * step)
        assert isinstance(emit, Emit)
        rows += emit.rows
        full = state.block_hashes((5 + step) // 4, 4)
        assert len(core.prefix_cache.match(full)) == len(full)
    assert [len(row) == PLAIN_FIELDS for row in rows] == [False, *[True] * 7, False]
    assert [row[1] for row in rows] == list(range(9))


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_pooling_ends_with_the_prompt(pooling: str) -> None:
    driver = Driver(config(token_budget=3, lookahead=True, prefix_cache=True))
    driver.submit(request(1, prompt=10, pooling=pooling))
    driver.drain()
    assert driver.callers[1].pooled
    assert driver.callers[1].finish is FinishReason.STOP
    assert not any(part.samples for plan in driver.plans for part in plan.named_slices)
    driver.submit(request(2, tokens=driver.callers[1].request.prompt, pooling=pooling))
    driver.drain()
    computed = sum(
        p.num_tokens for plan in driver.plans for p in plan.named_slices if p.request_id == 2
    )
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


def test_a_poisoned_request_is_found_and_the_others_finish() -> None:
    driver = Driver(config(lookahead=True))
    for number in range(6):
        driver.submit(request(number, output=9))
    driver.poison[4] = lambda part: True
    driver.drain()
    driver.check_everyone_finished(but_errors=[4])
    assert driver.callers[4].finish is FinishReason.ERROR


@pytest.mark.parametrize("changes", [{}, {"lookahead": True}, {"num_stages": 3}], ids=str)
@pytest.mark.parametrize("num_others", [0, 3])
@pytest.mark.parametrize("begin", [0, 2, 5])
def test_an_overflow_ends_its_request_alone(
    changes: dict[str, Any], num_others: int, begin: int
) -> None:
    driver = Driver(config(**changes))
    for number in (*range(num_others), 99):
        driver.submit(request(number, output=8))
    culprit = driver.callers[99]
    while len(culprit.tokens) < begin or not samples(driver, 99):
        driver.answer()
    driver.overflow(99)
    assert culprit.finish is FinishReason.ERROR
    assert len(culprit.tokens) == begin
    driver.drain()
    driver.check_everyone_finished(but_errors=[99])
    assert driver.failures == 0  # the others compute nothing twice
    # With lookahead its next token, drawn in vain, is here as good as any.
    in_a_row = num_others == 0 and "lookahead" not in changes
    assert driver.core.outcomes.num_overflows_in_a_row == in_a_row


@pytest.mark.parametrize("token", [NOT_FINITE, DEAD_END, SLOW_GRAMMAR])
def test_a_dead_end_of_a_grammar_is_no_overflow(token: int) -> None:
    core = build_core(config())
    core.handle(Submit(request(1, sampling={"grammar": Grammar("regex", r"a[^\s\S]")})), 0.0)
    emit, *_ = core.handle(StepDone(StepResult(0, ((1, token),))), 0.1)
    assert isinstance(emit, Emit)
    message = emit.outputs[0].error
    assert message is not None
    assert ("overflow" in message) == (token == NOT_FINITE)
    assert (message == ALLOWS_NOTHING) == (token == DEAD_END)
    assert (message == TAKES_TOO_LONG) == (token == SLOW_GRAMMAR)
    assert core.outcomes.num_overflows_in_a_row == (token == NOT_FINITE)


def test_an_overflow_after_an_accepted_draft_ends_its_request() -> None:
    driver = Driver(config(drafter="lookup", max_drafts=4, max_model_len=200))
    driver.submit(request(99, prompt=40, output=60))
    driver.submit(request(1, prompt=40, output=60))
    culprit = driver.callers[99]
    while not {99} & {i for i, _ in driver.outstanding[0].drafts}:
        driver.answer()
    driver.overflow(99)
    assert culprit.finish is FinishReason.ERROR
    driver.drain()
    driver.check_everyone_finished(but_errors=[99])
    assert driver.failures == 0


def samples(driver: Driver, request_id: int) -> bool:
    return any(p.request_id == request_id and p.samples for p in driver.outstanding[0].named_slices)


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
        if 1 in {part.request_id for part in driver.outstanding[0].named_slices}:
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
