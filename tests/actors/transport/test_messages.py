"""Every message survives its trip unchanged, and travels as msgpack."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actors.scheduling.events import PLAIN_FIELDS, Output, Refuse
from actors.scheduling.interfaces import QuoteRequest
from actors.scheduling.plan import RequestStart, Slice, StepPlan, StepResult, TokenLogprobs
from actors.scheduling.request import (
    FinishReason,
    Frame,
    Grammar,
    Objective,
    Request,
    SamplingParams,
)
from actors.transport.messages import (
    AbortRequests,
    Answer,
    Ask,
    IterationOutputs,
    IterationRecord,
    StepError,
    SubmitRequests,
    output_of,
    pack,
    pack_kind,
    read_answer,
    read_value,
    unpack,
    unpack_kind,
)

ids = st.integers(0, 2**40)
tokens = st.lists(st.integers(0, 200_000), max_size=8).map(tuple)
blocks = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple)
pairs = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=3).map(tuple)
floats = st.floats(allow_nan=False, allow_infinity=False)
frames = st.builds(
    Frame,
    **dict.fromkeys(("reasoning", "is_begun", "calls", "marks", "held", "heads", "tail"), ...),
    most_calls=st.integers(0, 9),
)
sampling = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 10_000),
    temperature=st.floats(0, 2),
    seed=st.integers(0, 2**63 - 1),
    stop_token_ids=tokens,
    logit_bias=st.lists(st.tuples(st.integers(0, 99), floats), max_size=3).map(tuple),
    logprobs=st.none() | st.integers(0, 20),
    grammar=st.none() | st.builds(Grammar, frame=st.none() | frames),
)
logprob = st.builds(
    TokenLogprobs,
    token=st.integers(0, 99),
    logprob=floats,
    rank=st.integers(1, 9),
    top=st.lists(st.tuples(st.integers(0, 99), floats), max_size=3).map(tuple),
)
plans = st.builds(
    StepPlan,
    step_id=ids,
    slices=st.lists(st.builds(Slice, ids, ids, ids, st.booleans()), max_size=4).map(tuple),
    released=tokens,
    swap_out=pairs,
    swap_in=pairs,
    copies=pairs,
    started=st.lists(
        st.builds(RequestStart, ids, tokens, ids, blocks, sampling, st.none() | st.just("mean")),
        max_size=2,
    ).map(tuple),
    new_blocks=st.lists(st.tuples(ids, blocks), max_size=3).map(tuple),
    fed=st.lists(st.tuples(ids, ids, ids), max_size=3).map(tuple),
)


@given(plans)
def test_plan(plan: StepPlan) -> None:
    assert unpack(StepPlan, pack(plan)) == plan


@given(
    st.builds(
        StepResult,
        step_id=ids,
        tokens=pairs,
        logprobs=st.lists(st.tuples(ids, logprob), max_size=2).map(tuple),
        prompt_logprobs=st.lists(
            st.tuples(ids, ids, st.lists(logprob, max_size=2).map(tuple)), max_size=2
        ).map(tuple),
        pooled=st.lists(st.tuples(ids, st.lists(floats, max_size=3).map(tuple)), max_size=2).map(
            tuple
        ),
        stage_times_s=st.lists(st.tuples(floats, floats), max_size=3).map(tuple),
    )
)
def test_result(result: StepResult) -> None:
    assert unpack(StepResult, pack(result)) == result
    assert read_answer(result.step_id, pack(result), None) == result


@given(
    st.lists(
        st.builds(
            Request,
            request_id=ids,
            prompt=tokens,
            sampling=sampling,
            arrival_s=floats,
            output=tokens,
            tenant=st.text(max_size=5),
            priority=st.integers(-5, 5),
            objective=st.builds(Objective, st.none() | floats, st.none() | floats),
            group=st.none() | st.text(max_size=5),
            pooling=st.none() | st.just("last"),
            cache_salt=st.text(max_size=5),
        ),
        max_size=3,
    ).map(tuple)
)
def test_submission(requests: tuple[Request, ...]) -> None:
    message = SubmitRequests(requests)
    assert unpack_kind(pack_kind(message)) == message


@given(
    st.lists(
        st.builds(
            Output,
            request_id=ids,
            index=ids,
            tokens=tokens,
            finish_reason=st.none() | st.sampled_from(FinishReason),
            num_cached_tokens=st.integers(0, 5),
            logprobs=st.lists(logprob, max_size=2).map(tuple),
            prompt_logprobs=st.lists(st.none() | logprob, max_size=2).map(tuple),
            pooled=st.lists(floats, max_size=2).map(tuple),
            error=st.none() | st.text(max_size=5),
            queued_s=floats,
        ),
        max_size=4,
    ).map(tuple)
)
def test_outputs(outputs: tuple[Output, ...]) -> None:
    rows = (*outputs, (7, 3, 11))
    message = unpack_kind(pack_kind(IterationOutputs(rows)))
    assert tuple(output_of(row) for row in message.rows) == (*outputs, Output(7, 3, (11,)))
    assert len(message.rows[-1]) == PLAIN_FIELDS


def test_every_other_kind_survives() -> None:
    record = IterationRecord(1, 0.5, 0.75, None, 3, 4, 2, ((0.5, 0.7),), 1, 1, 0, 9, 0, 0, 256)
    for message in (
        AbortRequests((1, 2)),
        Ask(3, "reconfigure", ({"policy": "orca", "policy_options": {"max_batch": 4}},)),
        Answer(3, {"num_waiting": 0}),
        Answer(4, None, "ValueError: no"),
        Refuse(1, "full", None, 1.5),
        Refuse(2, "never", "prompt"),
        IterationOutputs(((1, 0, 5),), (tuple(record),)),
    ):
        assert unpack_kind(pack_kind(message)) == message


def test_a_value_in_a_message_is_read_as_its_kind() -> None:
    asked = QuoteRequest(5, 6, Objective(ttft_s=0.5), "ann")
    ask = unpack_kind(pack_kind(Ask(1, "quote", (asked, 2.5))))
    assert read_value(QuoteRequest, ask.arguments[0]) == asked


def test_an_answer_to_another_step_is_an_error() -> None:
    packed = pack(StepResult(4, ((1, 2),)))
    assert isinstance(read_answer(5, packed, None), StepError)
    assert read_answer(5, b"", "boom") == StepError(5, "boom")
