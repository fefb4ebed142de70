"""What travels between the processes of one replica, as msgpack (never pickle).

Replica -> scheduler: submissions, aborts, questions. Scheduler -> stages: step plans. Last stage ->
scheduler: step results (through the compiled graph). Scheduler -> replica: one news message per
iteration. Only plain frozen data, no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

import msgpack

from actors.scheduling.events import Output
from actors.scheduling.plan import RequestStart, Slice, StepPlan, StepResult, TokenLogprobs
from actors.scheduling.request import FinishReason, Grammar, Objective, Request, SamplingParams

Question = Literal["status", "stage_pids", "reconfigure"]

# ---- pieces ------------------------------------------------------------------------------


def _pack_sampling(p: SamplingParams) -> list[Any]:
    values = [getattr(p, name) for name in _SAMPLING_FIELDS]
    values[_GRAMMAR_AT] = None if p.grammar is None else (p.grammar.kind, p.grammar.text)
    return values


def _unpack_sampling(values: list[Any]) -> SamplingParams:
    values = list(values)
    grammar = values[_GRAMMAR_AT]
    values[_GRAMMAR_AT] = None if grammar is None else Grammar(*grammar)
    values[_STOP_AT] = tuple(values[_STOP_AT])
    values[_BIAS_AT] = tuple((token, bias) for token, bias in values[_BIAS_AT])
    return SamplingParams(*values)


_SAMPLING_FIELDS = [f.name for f in fields(SamplingParams)]
_GRAMMAR_AT = _SAMPLING_FIELDS.index("grammar")
_STOP_AT = _SAMPLING_FIELDS.index("stop_token_ids")
_BIAS_AT = _SAMPLING_FIELDS.index("logit_bias")


def _pack_logprobs(entry: TokenLogprobs | None) -> tuple[Any, ...] | None:
    return None if entry is None else (entry.token, entry.logprob, entry.rank, entry.top)


def _unpack_logprobs(values: list[Any] | None) -> TokenLogprobs | None:
    if values is None:
        return None
    token, logprob, rank, top = values
    return TokenLogprobs(token, logprob, rank, tuple((t, p) for t, p in top))


def _known_logprobs(values: list[Any]) -> TokenLogprobs:
    entry = _unpack_logprobs(values)
    if entry is None:
        raise ValueError("log-probabilities missing for a sampled token")
    return entry


# ---- scheduler -> stages --------------------------------------------------------------------


def pack_plan(plan: StepPlan) -> bytes:
    return msgpack.packb(
        (
            plan.step_id,
            plan.slices,
            plan.released,
            plan.swap_out,
            plan.swap_in,
            plan.copies,
            tuple(map(_pack_start, plan.started)),
            plan.new_blocks,
            plan.fed,
        )
    )


def _pack_start(start: RequestStart) -> tuple[Any, ...]:
    return (
        start.request_id,
        start.tokens,
        start.num_prompt_tokens,
        start.block_ids,
        _pack_sampling(start.sampling),
        start.pooling,
    )


def unpack_plan(data: bytes) -> StepPlan:
    step_id, slices, released, swap_out, swap_in, copies, started, new_blocks, fed = (
        msgpack.unpackb(data, use_list=False)
    )
    return StepPlan(
        step_id,
        tuple([Slice(*s) for s in slices]),
        released,
        swap_out,
        swap_in,
        copies,
        tuple(
            RequestStart(request_id, tokens, num_prompt, block_ids, _unpack_sampling(p), pooling)
            for request_id, tokens, num_prompt, block_ids, p, pooling in started
        ),
        new_blocks,
        fed,
    )


# ---- last stage -> scheduler ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepError:
    """A stage raised; the graph lives on."""

    step_id: int
    message: str


def pack_result(result: StepResult) -> bytes:
    return msgpack.packb(
        (
            result.step_id,
            result.tokens,
            [(r, _pack_logprobs(entry)) for r, entry in result.logprobs],
            [
                (r, first, [_pack_logprobs(entry) for entry in entries])
                for r, first, entries in result.prompt_logprobs
            ],
            result.pooled,
            result.stage_times_s,
        )
    )


def unpack_result(data: bytes) -> StepResult:
    step_id, tokens, logprobs, prompt_logprobs, pooled, times = msgpack.unpackb(
        data, use_list=False
    )
    return StepResult(
        step_id,
        tokens,
        tuple(map(_token_logprobs, logprobs)),
        tuple(map(_prompt_logprobs, prompt_logprobs)),
        pooled,
        times,
    )


def _token_logprobs(row: tuple[int, Any]) -> tuple[int, TokenLogprobs]:
    return row[0], _known_logprobs(row[1])


def _prompt_logprobs(row: tuple[int, int, Any]) -> tuple[int, int, tuple[TokenLogprobs, ...]]:
    request_id, first, entries = row
    return request_id, first, tuple(map(_known_logprobs, entries))


# ---- replica -> scheduler -------------------------------------------------------------------


def pack_submit(requests: list[Request]) -> bytes:
    return msgpack.packb(
        (
            "submit",
            [
                (
                    r.request_id,
                    r.prompt,
                    _pack_sampling(r.sampling),
                    r.arrival_s,
                    r.output,
                    r.tenant,
                    r.priority,
                    (r.objective.tbt_s, r.objective.ttft_s),
                    r.group,
                    r.pooling,
                    r.cache_salt,
                )
                for r in requests
            ],
        )
    )


def unpack_requests(rows: list[Any]) -> list[Request]:
    return [
        Request(
            request_id,
            tuple(prompt),
            _unpack_sampling(sampling),
            arrival_s,
            tuple(output),
            tenant,
            priority,
            Objective(*objective),
            group,
            pooling,
            salt,
        )
        for (
            request_id, prompt, sampling, arrival_s, output, tenant,
            priority, objective, group, pooling, salt,
        ) in rows
    ]  # fmt: skip


def pack_abort(request_ids: list[int]) -> bytes:
    return msgpack.packb(("abort", request_ids))


def pack_ask(ticket: int, question: Question, arguments: tuple[Any, ...] = ()) -> bytes:
    """Call a method of `EngineLoop`; comes back as ("answer", ticket, value, failure or None)."""
    return msgpack.packb(("ask", (ticket, question, arguments)))


# ---- scheduler -> replica -------------------------------------------------------------------


PLAIN_FIELDS = 3  # request, index, tokens: the row of a token that comes with nothing else
_PLAIN = Output(0, 0, ())[PLAIN_FIELDS:]


def pack_outputs(outputs: tuple[Output, ...]) -> list[Any]:
    """Rows of an iteration's news; the common case (a plain token) is PLAIN_FIELDS long."""
    rows: list[Any] = []
    for o in outputs:
        if o[PLAIN_FIELDS:] == _PLAIN:
            rows.append((o.request_id, o.index, o.tokens))
        else:
            rows.append(
                (
                    o.request_id,
                    o.index,
                    o.tokens,
                    None if o.finish_reason is None else o.finish_reason.value,
                    o.num_cached_tokens,
                    [_pack_logprobs(entry) for entry in o.logprobs],
                    [_pack_logprobs(entry) for entry in o.prompt_logprobs],
                    o.pooled,
                    o.error,
                    o.queued_s,
                )
            )
    return rows


def unpack_output(row: Any) -> Output:
    if len(row) == PLAIN_FIELDS:
        return Output(row[0], row[1], tuple(row[2]))
    (
        request_id, index, tokens, reason, cached,
        logprobs, prompt_logprobs, pooled, error, queued_s,
    ) = row  # fmt: skip
    return Output(
        request_id,
        index,
        tuple(tokens),
        None if reason is None else FinishReason(reason),
        cached,
        tuple(_known_logprobs(entry) for entry in logprobs),
        tuple(_unpack_logprobs(entry) for entry in prompt_logprobs),
        tuple(pooled),
        error,
        queued_s,
    )


# Iteration records ride on news messages: these fields, in this order.
ITERATION_FIELDS = (
    "step",
    "submitted_s",
    "done_s",
    "predicted_s",
    "num_decode_tokens",
    "num_prefill_tokens",
    "num_requests",
    "stages_s",
    "num_decoding",
    "num_prefilling",
    "num_waiting",
    "num_free_blocks",
    "num_preemptions",
    "num_recoveries",
    "token_budget",
)


def iteration_dict(record: list[Any]) -> dict[str, Any]:
    """An iteration record with its fields named."""
    return dict(zip(ITERATION_FIELDS, record, strict=True))
