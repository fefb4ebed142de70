"""From a step's answer to news for the callers: tokens appended, requests ended."""

from __future__ import annotations

from collections.abc import Sequence

from actors.scheduling.events import Output
from actors.scheduling.plan import StepResult, TokenLogprobs
from actors.scheduling.request import FinishReason
from actors.scheduling.memory.running import Residents
from actors.scheduling.state import Fate, RequestState, Status
from actors.scheduling.step import InFlight

_make = tuple.__new__


class Outcomes:
    def __init__(self, residents: Residents) -> None:
        self.residents = residents

    def take(self, step: InFlight, result: StepResult) -> list[Output]:
        """Apply the answer to a step; returns the news, one output a request at most.

        The loop runs once per generated token: everything rare waits behind `attend_at`.
        """
        if len(result.tokens) != len(step.sampled):
            raise ValueError(
                f"step {step.plan.step_id}: {len(result.tokens)} tokens for "
                f"{len(step.sampled)} sampling slices"
            )
        now_s = self.residents.now_s
        outputs: list[Output] = []
        add = outputs.append
        logprobs = dict(result.logprobs) if result.logprobs else None
        for request_id, first, entries in result.prompt_logprobs:
            self._take_prompt_logprobs(request_id, first, entries)
        if self.residents.order.counts_tokens:
            self.residents.order.serve(
                [state for state in step.sampled if state.status is Status.RUNNING]
            )
        for state, (request_id, token) in zip(step.sampled, result.tokens, strict=True):
            if request_id != state.request_id:
                raise ValueError(f"step {step.plan.step_id}: token for {request_id} out of order")
            state.in_flight -= 1
            length = state.length
            if length >= state.attend_at or token in state.stops:
                self._attend(state, token, outputs, logprobs)
                continue
            state.outputs.append(token)
            state.length = length + 1
            state.last_token_s = now_s
            if logprobs is None:
                index = length - state.num_prompt_tokens
                add(_make(Output, (request_id, index, (token,), None, 0, (), (), (), None, 0.0)))
            else:
                add(_output(state, token, None, logprobs))
        if step.partial:
            self._take_partial(step, result, outputs)
        return outputs

    def _attend(
        self,
        state: RequestState,
        token: int,
        outputs: list[Output],
        logprobs: dict[int, TokenLogprobs] | None,
    ) -> None:
        """A token that is not routine: the first, a block's last, an end, or one too late."""
        if not self._is_news(state):
            self._drain(state)
            return
        residents = self.residents
        computed = state.length  # all known tokens were computed to give this one
        is_first = state.num_output_tokens == len(state.request.output)
        state.outputs.append(token)
        state.length += 1
        state.last_token_s = residents.now_s
        if state.first_token_s is None:
            state.first_token_s = residents.now_s
        if state.status is Status.RUNNING:
            if residents.config.prefix_cache:
                residents.commit(state, computed)
            if state.request.group is not None:
                for follower in residents.groups.prompt_done(state):
                    residents.order.push(follower, residents.now_s)
            state.attend_at = residents.next_attention(state)
        reason = self._finish_reason(state, token)
        outputs.append(_output(state, token, reason, logprobs, is_first))
        if reason is not None:
            residents.order.finish(state)
            self.end(state)
        if state.status is Status.LEAVING:
            self._drain(state)

    @staticmethod
    def _is_news(state: RequestState) -> bool:
        """A preempted request's last results count; an ended or failed one's do not."""
        return state.status is Status.RUNNING or (not state.discard and state.fate is not Fate.END)

    def _finish_reason(self, state: RequestState, token: int) -> FinishReason | None:
        if token in state.stops and state.num_output_tokens > state.request.sampling.min_tokens:
            return FinishReason.STOP
        if state.length >= state.max_length:
            return FinishReason.LENGTH
        return None

    def already_over(self, state: RequestState) -> FinishReason | None:
        """A replayed request may have had all its tokens before its replica failed."""
        if not state.outputs or state.request.pooling is not None:
            return None
        return self._finish_reason(state, state.outputs[-1])

    def _take_partial(self, step: InFlight, result: StepResult, outputs: list[Output]) -> None:
        """Prefill slices that sampled nothing."""
        pooled = dict(result.pooled)
        for state, end in step.partial:
            state.in_flight -= 1
            if state.status is Status.RUNNING and self.residents.config.prefix_cache:
                self.residents.commit(state, end)
            if self._is_news(state) and state.request.pooling is not None and end == state.length:
                outputs.append(self._pooled(state, pooled))
                self.residents.order.finish(state)
                self.end(state)
            if state.status is Status.LEAVING:
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

    def _take_prompt_logprobs(
        self, request_id: int, first: int, entries: Sequence[TokenLogprobs]
    ) -> None:
        """Keep what is new; a recomputed prompt tells the same again."""
        state = self.residents.states.get(request_id)
        if state is not None and not state.discard:
            known = len(state.prompt_logprobs)
            if first <= known < state.num_prompt_tokens:
                state.prompt_logprobs += entries[known - first : state.num_prompt_tokens - first]

    def end(self, state: RequestState) -> None:
        """The request is over, in whatever state it is."""
        if state.status is Status.WAITING:
            self.residents.drop_waiting(state)
        elif state.status is Status.RUNNING:
            self.residents.leave(state, Fate.END)
        elif state.status is Status.LEAVING:
            state.fate = Fate.END

    def _drain(self, state: RequestState) -> None:
        """One step fewer touches a LEAVING request."""
        if state.in_flight == 0:
            self.residents.drained(state)


def _output(
    state: RequestState,
    token: int,
    reason: FinishReason | None,
    logprobs: dict[int, TokenLogprobs] | None,
    is_first: bool = False,
) -> Output:
    request_id = state.request_id
    entry = logprobs.get(request_id) if logprobs else None
    wants_prompt = is_first and state.request.sampling.prompt_logprobs is not None
    return Output(
        request_id,
        state.num_output_tokens - 1,
        (token,),
        reason,
        state.num_cached_tokens if is_first else 0,
        () if entry is None else (entry,),
        tuple(state.prompt_logprobs) if wants_prompt else (),
        queued_s=_queued_s(state) if is_first else 0.0,
    )


def _queued_s(state: RequestState) -> float:
    planned_s = state.first_planned_s
    return 0.0 if planned_s is None else planned_s - state.request.arrival_s
