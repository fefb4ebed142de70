"""Every message survives its trip unchanged, and travels as msgpack."""

from __future__ import annotations

import msgpack
from hypothesis import given
from hypothesis import strategies as st

from actors.scheduling.events import Output
from actors.scheduling.plan import RequestStart, Slice, StepPlan, StepResult, TokenLogprobs
from actors.scheduling.request import FinishReason, Grammar, Objective, Request, SamplingParams
from actors.transport.messages import (
    pack_outputs,
    pack_plan,
    pack_result,
    pack_submit,
    unpack_output,
    unpack_plan,
    unpack_requests,
    unpack_result,
)

ids = st.integers(0, 2**40)
tokens = st.lists(st.integers(0, 200_000), max_size=8).map(tuple)
blocks = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple)
pairs = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=3).map(tuple)
floats = st.floats(allow_nan=False, allow_infinity=False)
sampling = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 10_000),
    temperature=st.floats(0, 2),
    seed=st.integers(0, 2**63 - 1),
    stop_token_ids=tokens,
    logit_bias=st.lists(st.tuples(st.integers(0, 99), floats), max_size=3).map(tuple),
    logprobs=st.none() | st.integers(0, 20),
    grammar=st.none() | st.builds(Grammar, kind=st.just("regex"), text=st.text()),
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
    assert unpack_plan(pack_plan(plan)) == plan


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
    assert unpack_result(pack_result(result)) == result


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
    )
)
def test_submission(requests: list[Request]) -> None:
    kind, rows = msgpack.unpackb(pack_submit(requests))
    assert kind == "submit"
    assert unpack_requests(rows) == requests


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
def test_news(outputs: tuple[Output, ...]) -> None:
    rows = msgpack.unpackb(msgpack.packb(pack_outputs(outputs)))
    assert tuple(unpack_output(row) for row in rows) == outputs
