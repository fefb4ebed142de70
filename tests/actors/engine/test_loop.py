"""The loop around the core: tokens, refusals and records reach their receivers, once."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from inspect import iscoroutinefunction
from typing import Any, get_args

import pytest

from actors.engine.peers import OWNER, first_id
from actors.engine.questions import ANSWERED_LATER, Questions
from actors.executor.stage_set import StagesFailed
from actors.scheduling.budgets.fixed import FixedBudget
from actors.scheduling.events import Refuse
from actors.scheduling.plan import NOT_FINITE
from actors.scheduling.request import FinishReason, Grammar, Request
from actors.transport.messages import (
    AbortRequests,
    Answer,
    Ask,
    IterationOutputs,
    IterationRecord,
    Question,
    Readiness,
    RefusedSetting,
    RequestsStarted,
    Suspects,
)
from tests.actors.engine.paper_engine import Engine, background
from tests.actors.scheduling.short_lives import request

FRONT, OTHER = 1, 2  # connections
GRAMMAR = Grammar("regex", "a+")


def with_grammar(number: int) -> Request:
    return request(number, sampling={"grammar": GRAMMAR})


both = pytest.mark.parametrize("lookahead", [False, True])


@both
async def test_tokens_arrive_in_order_and_nothing_stays(lookahead: bool) -> None:
    engine, requests = Engine(lookahead=lookahead), [request(1, output=6), request(2, prompt=9)]
    engine.submit(*requests)
    assert engine.stream(1) == ([], None, None)
    engine.stages.answer_all()
    engine.check_complete(*requests)
    engine.check_empty()
    assert [message.request_ids for message in engine.told(RequestsStarted)] == [(1,), (2,)]
    assert not engine.told(Refuse) + engine.told(Readiness) + engine.told(Suspects)


@both
async def test_a_step_that_fails_once_is_computed_again(lookahead: bool) -> None:
    engine, requests = Engine(lookahead=lookahead), [request(1, output=6), request(2, output=6)]
    engine.submit(*requests)
    engine.stages.answer()
    engine.stages.fail(engine.stages.unanswered.popleft())
    assert engine.told(Suspects)[-1].losses
    engine.stages.answer_all()
    engine.check_complete(*requests)
    engine.check_empty()
    assert engine.told(Suspects)[-1] == Suspects((), ())
    assert not engine.told(Readiness), "the stages were rebuilt for nothing"


@both
async def test_a_request_that_fails_every_step_ends_alone(lookahead: bool) -> None:
    engine = Engine(lookahead=lookahead)
    others = [request(1, output=20), request(3, output=20)]
    engine.submit(others[0], request(2), others[1])
    engine.stages.poison = 2
    engine.stages.answer_all()
    assert engine.stream(2) == ([], FinishReason.ERROR, "IndexError: 7")
    engine.check_complete(*others)
    engine.check_empty()
    assert not engine.told(Readiness)


async def test_stages_that_fail_every_step_are_rebuilt() -> None:
    engine, one = Engine(), request(1)
    engine.submit(one)
    engine.stages.poison = 1
    engine.stages.answer(4)
    engine.stages.poison = None
    await background()
    assert [message.is_ready for message in engine.told(Readiness)] == [False, True]
    engine.stages.answer_all()
    engine.check_complete(one)
    engine.check_empty()


@both
@pytest.mark.parametrize("num_answers", [0, 1, 3, 100])
async def test_lost_stages_cost_no_token_and_double_none(lookahead: bool, num_answers: int) -> None:
    engine = Engine(lookahead=lookahead)
    early = [request(1, output=6), request(2, prompt=20)]
    engine.submit(*early)
    engine.stages.answer(num_answers)
    engine.stages.may_go_on.clear()
    engine.stages.lose("a stage died")
    before = engine.stream(1)
    engine.stages.answer()  # it was on its way
    num_unanswered = len(engine.stages.unanswered)
    engine.submit(late := request(3))
    assert len(engine.stages.unanswered) == num_unanswered, "a plan for stages that are gone"
    assert engine.stream(1) == before
    engine.stages.may_go_on.set()
    await background()
    assert [message.is_ready for message in engine.told(Readiness)] == [False, True]
    engine.stages.answer_all()
    engine.check_complete(*early, late)
    engine.check_empty()
    records = [r for message in engine.told(IterationOutputs) for r in message.records]
    assert records[-1].num_recoveries == 1
    assert not engine.loop._recovery.num_rebuilds_in_a_row  # a later loss is not the second


async def test_stages_of_which_no_output_is_finite_are_rebuilt() -> None:
    engine = Engine()
    for number in range(1, 5):
        assert not engine.told(Readiness)
        engine.submit(request(number))
        result = engine.stages.fake.run(engine.stages.unanswered.popleft())
        tokens = tuple([(request_id, NOT_FINITE) for request_id, _ in result.tokens])
        engine.stages._on_answer(replace(result, tokens=tokens))
        await asyncio.sleep(0)  # a rebuild begins
        assert engine.stream(number)[1] is FinishReason.ERROR
    await background()
    assert [message.is_ready for message in engine.told(Readiness)] == [False, True]
    engine.check_empty()


async def test_a_request_that_waits_too_long_is_refused_though_nothing_else_happens() -> None:
    engine = Engine(max_requests=1, queue_timeout_s=0.02)
    refusals, refused = engine.wires.send_refusal, asyncio.Event()

    def send_refusal(refusal: Refuse) -> None:
        refusals(refusal)
        refused.set()

    engine.wires.send_refusal = send_refusal
    engine.submit(request(1, arrival_s=50.0))
    engine.submit(request(2, arrival_s=50.0))
    assert not engine.told(Refuse)
    engine.now_s += 1.0
    async with asyncio.timeout(30):
        await refused.wait()
    (refusal,) = engine.told(Refuse)
    assert (refusal.request_id, refusal.has_waited) == (2, True)


async def test_a_request_that_arrives_during_a_rebuild_is_no_suspect_of_the_loss() -> None:
    engine, early = Engine(lookahead=True), request(1, output=2)
    engine.submit(early)
    engine.stages.answer()
    assert len(engine.loop._core.in_flight) == 1
    engine.stages.may_go_on.clear()
    engine.stages.lose("a stage died")
    engine.submit(request(2))  # alone in its step, which no stage gets
    engine.submit(request(3))
    assert len(engine.loop._core.in_flight) == 2
    engine.stages.may_go_on.set()
    await background()
    assert engine.told(Suspects)[-1].losses == ((1, 1),)
    engine.stages.answer_all()
    engine.check_complete(early, request(2), request(3))
    engine.check_empty()


async def test_new_stages_compile_the_grammars_of_live_requests_first() -> None:
    engine, one = Engine(), with_grammar(1)
    engine.submit(one, request(2))
    await background()
    engine.stages.lose("a stage died")
    await background()
    assert engine.stages.prepared == [{GRAMMAR}]
    engine.stages.answer_all()
    engine.check_complete(one)


async def test_stages_that_die_while_they_compile_grammars_are_rebuilt_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, one = Engine(), with_grammar(1)
    engine.submit(one, request(2, output=6))
    await background()
    engine.stages.answer()
    engine.stages.may_compile.clear()
    engine.stages.lose("a stage died")
    recovery = engine.loop._recovery
    recovery.lose("no answer within 20.0 s")  # of the old stages: the deadline looks on
    await engine.stages.is_preparing.wait()
    engine.stages.lose("stage 0 rank 0 died")
    engine.stages.may_compile.set()
    await background()
    assert engine.stages.prepared == [{GRAMMAR}, {GRAMMAR}]
    assert (recovery.is_rebuilding, recovery.num_recoveries) == (False, 1)
    assert "stages lost (stage 0 rank 0 died): rebuilding them" in caplog.text
    assert [message.is_ready for message in engine.told(Readiness)] == [False, True]
    engine.stages.answer_all()
    engine.check_complete(one, request(2, output=6))
    engine.check_empty()


async def test_the_clock_of_another_node_says_nothing_of_a_step_s_deadline() -> None:
    engine = Engine(lookahead=False)
    engine.stages.times_s = ((7e6, 7e6 + 0.25),)  # since that node's boot
    engine.submit(request(1, output=3))
    engine.now_s += 0.5
    engine.stages.answer()
    prompt = request(1).prompt
    assert engine.loop._deadline.slowest_token_s == pytest.approx(0.5 / len(prompt))
    engine.now_s += 2.0
    engine.stages.answer_all()
    assert engine.loop._deadline.slowest_token_s == pytest.approx(0.99 * 2.0, rel=0.02)


async def test_the_deadline_of_a_lost_step_does_not_cost_the_new_stages() -> None:
    engine, one = Engine(), request(1)
    engine.submit(one)
    engine.stages.may_compile.clear()
    engine.stages.lose("a stage died")
    await engine.stages.is_preparing.wait()
    engine.loop._recovery.lose("no answer within 20.0 s")
    engine.stages.may_compile.set()
    await background()
    assert len(engine.stages.prepared) == 1
    engine.stages.answer_all()
    engine.check_complete(one)


@both
async def test_what_a_closed_connection_asked_for_is_aborted(lookahead: bool) -> None:
    engine = Engine(lookahead=lookahead, max_requests=3)
    kept, *gone = [request(first_id(n) + i) for n, i in ((OTHER, 0), (FRONT, 1), (FRONT, 2))]
    waiting = request(first_id(FRONT) + 3)
    engine.submit(kept)
    engine.submit(*gone, waiting)
    engine.stages.answer()
    engine.wires.close(FRONT)
    for one in (*gone, waiting):
        assert engine.stream(one.request_id)[1] is FinishReason.ABORT
    engine.stages.answer_all()
    engine.check_complete(kept)
    engine.check_empty()
    assert engine.num_ends == 0


async def test_the_engine_ends_with_its_owner() -> None:
    engine = Engine()
    engine.wires.close(OWNER)
    assert engine.num_ends == 1


async def test_an_abort_frees_the_blocks_at_once() -> None:
    engine = Engine()
    engine.submit(request(1, output=40))
    engine.stages.answer()
    engine.stages.answer()
    engine.wires.receive(OWNER, AbortRequests((1, 99)))
    tokens, reason, _ = engine.stream(1)
    assert (len(tokens), reason) == (2, FinishReason.ABORT)
    engine.stages.answer_all()
    engine.check_empty()


async def test_a_grammar_is_compiled_before_its_request_starts() -> None:
    engine, one = Engine(), with_grammar(1)
    engine.stages.may_go_on.clear()
    engine.submit(one)
    assert engine.core.is_idle
    engine.stages.may_go_on.set()
    await background()
    engine.stages.answer_all()
    engine.check_complete(one)
    engine.stages.compiled = StagesFailed("late")  # the first step compiles it
    engine.submit(other := with_grammar(2))
    await background()
    engine.stages.answer_all()
    engine.check_complete(other)


async def test_a_request_aborted_while_its_grammar_is_compiled_is_not_served() -> None:
    engine = Engine()
    engine.stages.may_go_on.clear()
    engine.submit(with_grammar(first_id(FRONT) + 1))
    engine.submit(with_grammar(7))
    engine.wires.close(FRONT)
    engine.wires.receive(OWNER, AbortRequests((7,)))
    engine.stages.may_go_on.set()
    await background()
    engine.check_empty()
    assert not engine.told(RequestsStarted)


async def test_refusals_go_to_the_peer_that_asked() -> None:
    engine, name = Engine(), first_id(FRONT) + 1
    engine.stages.compiled = "unbalanced ("
    engine.submit(with_grammar(name))
    engine.submit(request(1, prompt=64), request(2, tokens=(), prompt=0))
    await background()
    refusals = [(n, m) for n, m in engine.wires.sent if isinstance(m, Refuse)]
    assert [(n, r.request_id, r.param) for n, r in refusals] == [
        (OWNER, 1, "prompt"),
        (OWNER, 2, "prompt"),
        (FRONT, name, "response_format"),
    ]
    assert refusals[2][1].message == "unbalanced ("
    engine.check_empty()


async def test_answers_go_to_the_peer_that_asked() -> None:
    engine = Engine()
    engine.wires.receive(FRONT, Ask(1, "load_adapter", (1, "folder")))
    engine.wires.receive(OTHER, Ask(2, "reconfigure", ({"color": 1},)))
    await background()
    assert engine.wires.sent == [
        (OTHER, Answer(2, RefusedSetting("color", "color: unknown setting"))),
        (FRONT, Answer(1, None)),
    ]
    assert engine.stages.adapters == {1: "folder"}
    coroutines = {n for n in get_args(Question) if iscoroutinefunction(getattr(Questions, n))}
    assert coroutines == ANSWERED_LATER


async def test_steps_know_of_the_adapters_that_load() -> None:
    engine = Engine()
    engine.stages.may_go_on.clear()
    for slot in (1, 2):
        engine.wires.receive(FRONT, Ask(slot, "load_adapter", (slot, "folder")))
    await asyncio.sleep(0)
    assert engine.core.view.num_adapter_loads == 2
    engine.submit(request(1, prompt=3))
    assert engine.stages.unanswered[0].adapter_load_s > 0.0
    engine.stages.may_go_on.set()
    await background()
    assert engine.core.view.num_adapter_loads == 0
    engine.stages.answer_all()


@pytest.mark.parametrize("name", ["__setattr__", "answer", "_core", "color"])
async def test_a_peer_calls_nothing_but_what_is_named(name: Any) -> None:
    engine = Engine()
    engine.wires.receive(FRONT, Ask(7, name, ("_core", None)))
    await background()
    ((peer, answer),) = engine.wires.sent
    assert (peer, answer.ticket, answer.value) == (FRONT, 7, None)
    assert f"no such question: {name!r}" in answer.failure


class Holding(FixedBudget):
    holds_starts = True


async def test_records_fall_due_with_their_counts() -> None:
    engine = Engine(Holding(12), max_requests=2)
    engine.submit(*[request(number, prompt=10, output=4) for number in (1, 2, 3)])
    batches: list[list[IterationRecord]] = []
    while engine.stages.unanswered:
        engine.now_s += 0.04
        engine.wires.sent.clear()
        engine.stages.answer()
        batches.append([r for m in engine.told(IterationOutputs) for r in m.records])
    records = [record for batch in batches for record in batch]
    assert [record.step for record in records] == list(range(len(batches)))
    assert [len(batch) for batch in batches] == [0, 1, 0, 0, 3, 0, 0, 4]  # a tenth of a second each
    assert (records[0].submitted_s, records[0].done_s) == (50.0, 50.04)
    # The third waits for a place, which the first one's last token leaves to it.
    counts = [(r.num_prefill_tokens, r.num_decode_tokens, r.num_requests) for r in records]
    assert counts == [(10, 0, 1), (10, 1, 2), (0, 2, 2), (0, 2, 2), (10, 1, 2), *[(0, 1, 1)] * 3]
    assert [record.num_waiting for record in records] == [1, 1, 1, 0, 0, 0, 0, 0]
    assert [record.num_decoding for record in records] == [2, 2, 2, 2, 1, 1, 1, 0]
    assert [record.num_free_blocks for record in records] == [34, 34, 33, 33, 37, 37, 36, 40]
    assert {record.token_budget for record in records} == {12}
    assert all(record.holds_starts for record in records)
