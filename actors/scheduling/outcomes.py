"""Applies a step's answer: appends tokens, ends requests, and makes the outputs for clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from actors.scheduling.events import Output, OutputRow
from actors.scheduling.lifecycle import LiveRequests
from actors.scheduling.plan import DEAD_END, NOT_FINITE, SLOW_GRAMMAR, StepResult, TokenLogprobs
from actors.scheduling.request import ALLOWS_NOTHING, TAKES_TOO_LONG, FinishReason
from actors.scheduling.state import Fate, InFlight, RequestState, RequestStatus

_OVERFLOW = "the model's output is not finite: weights or activations overflow"
_NO_TOKEN = {
    NOT_FINITE: _OVERFLOW,
    DEAD_END: ALLOWS_NOTHING,
    SLOW_GRAMMAR: TAKES_TOO_LONG,
}


class Outcomes:
    """Applies the results of steps to requests, and makes the outputs."""

    def __init__(
        self, requests: LiveRequests, on_end: Callable[[RequestState], None] = lambda _: None
    ) -> None:
        """on_end: called with each request that is answered to its end."""
        self.requests = requests
        self._on_end = on_end
        self.running = requests.running
        self._keeps_states = requests.config.num_saved_states is not None
        self.num_prefilled_tokens = 0  # computed in answered steps
        self.num_accepted_drafts = 0
        self.num_overflows_in_a_row = 0  # requests that ended so, and no token drawn between

    def computed(self, step: InFlight, seconds: float) -> None:
        """Note the speed of a step, and how much of a backlog of prompts it held."""
        if not (self.running.prefilling or self.requests.waiting.num_requests):
            self.requests.backlogged.clear()
        elif step.num_prompt_tokens:
            self.requests.backlogged.append((step.num_prompt_tokens, step.shape))
        if seconds > 0:
            speed, mean = step.num_tokens / seconds, self.requests.tokens_per_s
            self.requests.tokens_per_s = speed if mean == 0 else 0.95 * mean + 0.05 * speed

    def apply(self, step: InFlight, result: StepResult) -> list[OutputRow]:
        """Apply the answer to a step; returns at most one output per request.

        The loop runs once per generated token, so it makes plain tuples, and rare cases are behind
        `slow_path_at`.
        """
        if len(result.tokens) != len(step.sampled):
            raise ValueError(
                f"step {step.plan.step_id}: {len(result.tokens)} tokens for "
                f"{len(step.sampled)} sampling slices"
            )
        self.num_prefilled_tokens += step.num_tokens - step.num_decode_tokens
        now_s = self.requests.now_s
        outputs: list[OutputRow] = []
        add = outputs.append
        complete_block = self.running.complete_block
        logprobs = _by_request(result) if result.logprobs else None
        extra = self._settle_drafts(step, result) if step.drafted else None
        for request_id, first, entries in result.prompt_logprobs:
            self._apply_prompt_logprobs(request_id, first, entries)
        if step.plan.saved_states:
            self.requests.settle_states(step.plan, is_done=True)
        if self.requests.waiting.follows_service:
            self.requests.waiting.served(step.sampled)
        for state, (request_id, token) in zip(step.sampled, result.tokens, strict=True):
            if request_id != state.request_id:
                raise ValueError(f"step {step.plan.step_id}: token for {request_id} out of order")
            state.in_flight -= 1
            num_tokens = state.num_tokens
            if num_tokens >= state.slow_path_at or token in state.stops:
                if not self._only_fills_block(state, token):
                    more = extra.get(request_id, ()) if extra else ()
                    self._slow_path(state, (token, *more), outputs, logprobs)
                    continue
                complete_block(state)
            token_ids = state.output_token_ids
            if logprobs is None:
                add((request_id, len(token_ids), token))
            token_ids.append(token)
            state.num_tokens = num_tokens + 1
            state.last_token_s = now_s
            if logprobs is not None:
                add(_output(state, (token,), None, logprobs))
        if step.partial:
            self._apply_partial(step, result, outputs)
        if self.num_overflows_in_a_row and any(t not in _NO_TOKEN for _, t in result.tokens):
            self.num_overflows_in_a_row = 0
        return outputs

    @staticmethod
    def _only_fills_block(state: RequestState, token: int) -> bool:
        """Whether all that is rare is that the tokens before this one fill a block."""
        return (
            state.num_tokens == state.slow_path_at < state.end
            and state.request.group is None
            and token not in state.stops
        )

    def _slow_path(
        self,
        state: RequestState,
        tokens: tuple[int, ...],
        outputs: list[OutputRow],
        logprobs: dict[int, list[TokenLogprobs]] | None,
    ) -> None:
        """Handle rare tokens: the first, the last of a block, an end, several, or late ones.

        Tokens after an end are dropped; only drafts give several.
        """
        if not self._counts(state):
            self._drain(state)
            return
        requests, running = self.requests, self.running
        is_first = state.num_output_tokens == len(state.request.output)
        reason: FinishReason | None = None
        error: str | None = None
        for count, token in enumerate(tokens):
            if token in _NO_TOKEN:
                tokens, error = tokens[:count], _NO_TOKEN[token]
                break
            state.output_token_ids.append(token)
            state.num_tokens += 1
            reason = self._finish_reason(state, token)
            if reason is not None:
                tokens = tokens[: count + 1]
                break
        if len(tokens) > 1:
            self.num_accepted_drafts += len(tokens) - 1
            requests.waiting.served_more(state, len(tokens) - 1)
        if error is not None:
            self._failed(state, error, tokens, outputs, logprobs)
            return
        state.last_token_s = requests.now_s
        if state.first_token_s is None:
            state.first_token_s = requests.now_s
        if state.status is RequestStatus.RUNNING:
            if requests.config.prefix_cache:
                # Those computed to sample the last one, and not to be computed again
                running.commit(state, min(state.num_tokens - 1, state.num_computed_tokens))
            requests.waiting.prompt_done(state, requests.now_s)
            state.slow_path_at = running.next_slow_path(state)
        outputs.append(_output(state, tokens, reason, logprobs, is_first))
        if reason is not None:
            requests.waiting.finished(state)
            self._on_end(state)
            requests.end(state)
        if state.status is RequestStatus.FINISHING:
            self._drain(state)

    def _failed(
        self,
        state: RequestState,
        error: str,
        tokens: tuple[int, ...],
        outputs: list[OutputRow],
        logprobs: dict[int, list[TokenLogprobs]] | None,
    ) -> None:
        """End a request for which no token could be drawn after these; the other requests of the
        step go on."""
        self.num_overflows_in_a_row += error == _OVERFLOW
        entries = logprobs.get(state.request_id, ()) if logprobs else ()
        first = state.num_output_tokens - len(tokens)
        failed = Output.failed(state.request_id, first, error)
        outputs.append(failed._replace(tokens=tokens, logprobs=tuple(entries[: len(tokens)])))
        self.requests.end(state)
        if state.status is RequestStatus.FINISHING:
            self._drain(state)

    def _settle_drafts(self, step: InFlight, result: StepResult) -> dict[int, tuple[int, ...]]:
        """Subtract rejected drafts from the computed tokens: their positions are computed again.
        Where layers keep a state, which is then behind them, all of the slice is."""
        extra = dict(result.extra_tokens)
        for part in step.drafted:
            state, size = part.state, self.requests.config.block_size
            num_accepted = len(extra.get(state.request_id, ()))
            state.num_drafts = 0
            if self._counts(state):
                num_rejected = part.num_drafts - num_accepted
                state.num_computed_tokens -= num_rejected
                needed = -(-(state.num_computed_tokens + 1) // size)
                self.running.free_tail(state, max(part.num_blocks, needed))
                if num_rejected and state.status is RequestStatus.RUNNING and self._keeps_states:
                    state.go_back(part.num_tokens - num_rejected)
        return extra

    @staticmethod
    def _counts(state: RequestState) -> bool:
        """Whether late results count: those of a preempted request do, of an ended or failed one
        not.
        """
        return state.status is RequestStatus.RUNNING or (
            not state.discard and state.fate is not Fate.END
        )

    def _finish_reason(self, state: RequestState, token: int) -> FinishReason | None:
        if token in state.stops and state.num_output_tokens > state.request.sampling.min_tokens:
            return FinishReason.STOP
        if state.num_tokens >= state.max_length:
            return FinishReason.LENGTH
        return None

    def already_over(self, state: RequestState) -> FinishReason | None:
        """End a replayed request that had all its tokens before its replica failed."""
        if not state.output_token_ids or state.request.pooling is not None:
            return None
        return self._finish_reason(state, state.output_token_ids[-1])

    def _apply_partial(self, step: InFlight, result: StepResult, outputs: list[OutputRow]) -> None:
        """Prefill slices that sampled nothing."""
        pooled = dict(result.pooled)
        for state, end in step.partial:
            state.in_flight -= 1
            if state.status is RequestStatus.RUNNING and self.requests.config.prefix_cache:
                self.running.commit(state, end)
            if (
                self._counts(state)
                and state.request.pooling is not None
                and end == state.num_tokens
            ):
                outputs.append(self._pooled(state, pooled))
                self.requests.waiting.finished(state)
                self.requests.end(state)
            if state.status is RequestStatus.FINISHING:
                self._drain(state)

    def _pooled(self, state: RequestState, pooled: dict[int, tuple[float, ...]]) -> Output:
        if state.request_id not in pooled:
            raise ValueError(f"request {state.request_id}: its prompt is done but nothing pooled")
        return Output(
            state.request_id,
            0,
            (),
            FinishReason.STOP,
            state.num_cached_tokens,
            pooled=pooled[state.request_id],
            queued_s=_queued_s(state),
        )

    def _apply_prompt_logprobs(
        self, request_id: int, first: int, entries: Sequence[TokenLogprobs]
    ) -> None:
        """Keep new entries; a recomputed prompt repeats equal ones."""
        state = self.requests.by_id.get(request_id)
        if state is not None and not state.discard:
            known = len(state.prompt_logprobs)
            if first <= known < state.num_prompt_tokens:
                state.prompt_logprobs += entries[known - first : state.num_prompt_tokens - first]

    def _drain(self, state: RequestState) -> None:
        """Count an answered step of a FINISHING request."""
        if state.in_flight == 0:
            self.requests.drained(state)


def _by_request(result: StepResult) -> dict[int, list[TokenLogprobs]]:
    found: dict[int, list[TokenLogprobs]] = {}
    for request_id, entry in result.logprobs:
        found.setdefault(request_id, []).append(entry)
    return found


def _output(
    state: RequestState,
    tokens: tuple[int, ...],
    reason: FinishReason | None,
    logprobs: dict[int, list[TokenLogprobs]] | None,
    is_first: bool = False,
) -> OutputRow:
    request_id = state.request_id
    if len(tokens) == 1 and not (is_first or reason or logprobs):
        return request_id, state.num_output_tokens - 1, tokens[0]
    entries = logprobs.get(request_id, ()) if logprobs else ()
    wants_prompt = is_first and state.request.sampling.prompt_logprobs is not None
    return Output(
        request_id,
        state.num_output_tokens - len(tokens),
        tokens,
        reason,
        state.num_cached_tokens if is_first else 0,
        tuple(entries[: len(tokens)]),
        tuple(state.prompt_logprobs) if wants_prompt else (),
        queued_s=_queued_s(state) if is_first else 0.0,
    )


def _queued_s(state: RequestState) -> float:
    planned_s = state.first_planned_s
    return 0.0 if planned_s is None else planned_s - state.request.arrival_s
