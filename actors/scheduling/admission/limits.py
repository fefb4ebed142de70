"""What is turned away at the door, and who has waited too long."""

from __future__ import annotations

from collections import deque

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.events import Refuse
from actors.scheduling.interfaces import Admission
from actors.scheduling.request import Request
from actors.scheduling.memory.running import Residents
from actors.scheduling.state import RequestState, Status


class Intake:
    """Limits of the engine, of the queue and of each tenant; then the admission's own view."""

    def __init__(self, config: SchedulerConfig, admission: Admission) -> None:
        self.config = config
        self.admission = admission
        self.tokens_per_s = 0.0  # running mean of computed tokens, for retry_after_s
        self._arrivals: deque[tuple[float, RequestState]] = deque()  # for the queue's time-out

    def refusal(self, request: Request, residents: Residents) -> Refuse | None:
        """Why this request cannot be taken, or None."""
        return self._impossible(request, residents) or self._overload(request, residents)

    def _impossible(self, request: Request, residents: Residents) -> Refuse | None:
        """Faults of the request itself: trying again would not help."""
        config, name = self.config, request.request_id
        num_prompt, sampling = len(request.prompt), request.sampling
        if name in residents.states:
            return Refuse(name, f"request {name} is already here", "request_id")
        if num_prompt == 0:
            return Refuse(name, "the prompt is empty", "prompt")
        if request.pooling is not None:
            if num_prompt > config.max_model_len:
                return Refuse(
                    name,
                    f"the prompt has {num_prompt} tokens, the context holds {config.max_model_len}",
                    "prompt",
                )
            longest = num_prompt
        else:
            if sampling.max_tokens < 1:
                return Refuse(name, "max_tokens must be at least 1", "max_tokens")
            if num_prompt >= config.max_model_len:
                return Refuse(
                    name,
                    f"the prompt has {num_prompt} tokens and the context holds "
                    f"{config.max_model_len}: no room for an output token",
                    "prompt",
                )
            longest = min(num_prompt + sampling.max_tokens, config.max_model_len) - 1
        capacity = config.num_blocks * config.block_size
        if longest > capacity:
            param = "prompt" if num_prompt > capacity else "max_tokens"
            return Refuse(
                name, f"{longest} tokens of KV are needed, the cache holds {capacity}", param
            )
        return None

    def _overload(self, request: Request, residents: Residents) -> Refuse | None:
        """Limits that pass with time."""
        config, name = self.config, request.request_id
        limit = config.max_queued_requests
        if limit is not None and residents.num_waiting >= limit:
            return Refuse(name, f"{limit} requests wait already", None, self._retry_s(residents))
        limit = config.max_queued_tokens
        num_tokens = len(request.prompt) + len(request.output)
        # One request alone always fits: else a long prompt could never be served.
        if limit is not None and 0 < residents.num_waiting_tokens > limit - num_tokens:
            return Refuse(name, f"{limit} tokens wait already", None, self._retry_s(residents))
        limit = config.max_queued_per_tenant
        if limit is not None and residents.waiting_of.get(request.tenant, 0) >= limit:
            message = f"{limit} requests of this tenant wait already"
            return Refuse(name, message, None, self._retry_s(residents))
        refusal = self.admission.on_submit(request, residents)
        if refusal is not None:
            return Refuse(name, refusal.message, refusal.param, refusal.retry_after_s)
        return None

    def _retry_s(self, residents: Residents) -> float:
        """When half of what waits will have been computed, at the present speed."""
        if self.tokens_per_s <= 0:
            return 1.0
        return min(60.0, max(0.1, residents.num_waiting_tokens / self.tokens_per_s / 2))

    def observe(self, num_tokens: int, duration_s: float) -> None:
        """A step computed so many tokens in so much time."""
        if duration_s > 0:
            speed = num_tokens / duration_s
            mean = self.tokens_per_s
            self.tokens_per_s = speed if mean == 0 else 0.95 * mean + 0.05 * speed

    # ---- time-out ---------------------------------------------------------------------

    def entered(self, state: RequestState, now_s: float) -> None:
        if self.config.queue_timeout_s is not None:
            self._arrivals.append((now_s, state))

    def overdue(self, now_s: float) -> list[RequestState]:
        """Who has waited longer than the queue's time-out without ever starting."""
        timeout_s = self.config.queue_timeout_s
        late: list[RequestState] = []
        if timeout_s is None:
            return late
        arrivals = self._arrivals
        while arrivals and (
            arrivals[0][1].admitted
            or arrivals[0][1].status is Status.ENDED
            or arrivals[0][0] + timeout_s <= now_s
        ):
            _, state = arrivals.popleft()
            if not state.admitted and state.status is Status.WAITING and not state.outputs:
                late.append(state)
        return late

    def next_timeout_s(self) -> float | None:
        """When to look again; None while nobody is threatened."""
        if self.config.queue_timeout_s is None or not self._arrivals:
            return None
        return self._arrivals[0][0] + self.config.queue_timeout_s
