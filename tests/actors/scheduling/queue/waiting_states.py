"""Requests in the state that orders get them in, and the sequence they come out in."""

from __future__ import annotations

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.request import Request, SamplingParams
from actors.scheduling.state import RequestState, RequestStatus

CONFIG = SchedulerConfig(num_blocks=100, block_size=4, max_model_len=64, prefix_cache=False)


def state(number: int, prompt: int = 4, output: int = 4, **request: object) -> RequestState:
    request.setdefault("arrival_s", float(number))
    return RequestState(
        Request(number, tuple(range(prompt)), SamplingParams(output), **request),  # type: ignore[arg-type]
        number,
        64,
    )


def pop_all(order: object, now_s: float = 0.0) -> list[int]:
    out = []
    while (head := order.peek(now_s)) is not None:  # type: ignore[attr-defined]
        assert order.pop() is head  # type: ignore[attr-defined]
        head.status = RequestStatus.RUNNING
        out.append(head.request_id)
    return out
