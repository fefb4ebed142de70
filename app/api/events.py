"""The events of a request that the API reports to telemetry."""

from __future__ import annotations

from dataclasses import dataclass, field

from actors.scheduling.request import Objective


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """The data known at the start of a generation or of embeddings.

    endpoint: route path. num_prompt_tokens: of all its prompts. traceparent: the caller's W3C
    trace context as it was sent, "" for none. objective: its own; fields that
    are None stand for the deployment's.
    """

    request_id: str
    endpoint: str
    tenant: str
    stream: bool
    num_prompt_tokens: int
    num_continuations: int
    traceparent: str = ""
    objective: Objective = field(default_factory=Objective)


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """How it ended. status: HTTP status; reason: finish reason, "disconnect" or error code.

    queued_s: arrival at the engine to the first plan that holds it; of several prompts, the one
    that waited longest; 0 if it was never planned.
    """

    status: int
    reason: str
    num_completion_tokens: int
    num_cached_tokens: int
    queued_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """How long a request took, as the replica saw it.

    ttft_s: None without a token, and for embeddings without all vectors. max_tbt_s: longest time
    between tokens of a continuation, 0 without any. kept: whether it was answered to its end
    and all of its objectives were kept, None where it had none.
    """

    queued_s: float
    ttft_s: float | None
    max_tbt_s: float
    kept: bool | None


@dataclass(slots=True)
class Deliveries:
    """The deliveries of one call, for `ApiEvents`.

    tokens: (when, how many tokens, of which continuation, of how many of its steps) that are not
    counted yet; of embeddings one with 0 tokens, as all vectors are there. places: (since when,
    which continuation, at which engine it is computed), where there are several engines.
    """

    tokens: list[tuple[float, int, int, int]] = field(default_factory=list)
    places: list[tuple[float, int, str]] = field(default_factory=list)


class ApiEvents:
    """Hooks without effect, to be overridden. now_s is the event loop's clock."""

    def on_request_start(self, request: RequestInfo, now_s: float, deliveries: Deliveries) -> None:
        """The request is valid and tokenized, and is about to be sent to the engine.

        deliveries: filled as its tokens arrive, without a call per token; to be read and cleared
        periodically.
        """

    def on_finish(
        self, request: RequestInfo, outcome: RequestOutcome, now_s: float
    ) -> RequestTiming | None:
        """The request has ended in any way; called once for every on_request_start.

        Returns its timing; None if nothing is measured.
        """
        return None
