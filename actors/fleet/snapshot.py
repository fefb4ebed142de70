"""What a fleet decides by: what engines publish of themselves, and what arrives.

All plain, frozen data: it travels between processes and through the simulator as it is.
"""

from __future__ import annotations

import enum
import math
from bisect import bisect_left
from dataclasses import dataclass, field

from actors.scheduling.request import Objective

SHORT_DIGEST_BYTES = 8  # of a block's digest that travels: enough to distinguish a fleet's blocks


class EngineState(enum.StrEnum):
    """
    STARTING ──> SERVING ──> DRAINING ──> (gone)
                    └──────────────────> (gone)
    """

    STARTING = "starting"  # takes nothing yet
    SERVING = "serving"
    DRAINING = "draining"  # takes nothing new; its streams finish or move


@dataclass(frozen=True, slots=True)
class BitClass:
    """Engines of equal classes give a stream the same bytes, so a stream may move among them.

    Everything that decides how a number is rounded, and nothing else. model names the weights, with
    their revision; tensor_ranks is here because partial sums are added in another order; draw is
    the version of how tokens are drawn, which a seed's text depends on.
    """

    model: str
    dtype: str
    backend: str
    instruction_set: str
    quantisation: str = ""
    kv_dtype: str = ""
    tensor_ranks: int = 1
    draw: int = 1

    def differs_in(self, other: BitClass) -> tuple[str, ...]:
        """Names of the fields that are not equal.

        >>> a = BitClass("m", "bfloat16", "cpu", "avx512_bf16")
        >>> a.differs_in(BitClass("m", "bfloat16", "cpu", "avx2"))
        ('instruction_set',)
        """
        return tuple(
            name
            for name in self.__dataclass_fields__
            if getattr(self, name) != getattr(other, name)
        )


@dataclass(frozen=True, slots=True)
class OutlookPoint:
    """For a prompt of num_tokens to compute, submitted when the snapshot was taken. Seconds.

    ttft_s: to its first token, as likely later as earlier.
    promised_s: the tightest TTFT objective that admission would take it under.
    """

    num_tokens: int
    ttft_s: float
    promised_s: float


@dataclass(frozen=True, slots=True)
class Outlook:
    """Admission's own prediction, as a curve: what a quote would predict, without asking.

    Between points it is a line, and past the last one the last line goes on. Work that was sent
    since the snapshot stands before a new prompt as if it were part of it: the curve is read that
    much further right.

    tbt_s: between tokens with one stream more, of no context, beside those that run.
    tbt_per_stream_s, tbt_per_token_s: what each further stream, and each token of its context, add.
    prefill_rate: prompt tokens a second that it could compute beside a single stream; 0.0: unknown.
    decode_share: share of the time of a step that the running streams take, beyond a single one's.
    """

    points: tuple[OutlookPoint, ...] = ()
    tbt_s: float = 0.0
    tbt_per_stream_s: float = 0.0
    tbt_per_token_s: float = 0.0
    prefill_rate: float = 0.0
    decode_share: float = 0.0

    def at(self, num_tokens: int) -> tuple[float, float]:
        """(ttft_s, promised_s) of a prompt of so many tokens to compute, work ahead included.

        >>> outlook = Outlook((OutlookPoint(0, 1.0, 2.0), OutlookPoint(100, 2.0, 4.0)))
        >>> outlook.at(50), outlook.at(200)
        ((1.5, 3.0), (3.0, 6.0))
        """
        points = self.points
        if not points:
            return math.nan, math.nan
        if len(points) == 1:
            return points[0].ttft_s, points[0].promised_s
        at = bisect_left(points, num_tokens, 1, len(points) - 1, key=lambda p: p.num_tokens)
        low, high = points[at - 1], points[at]
        part = (num_tokens - low.num_tokens) / (high.num_tokens - low.num_tokens)
        part = max(part, 0.0)
        return (
            low.ttft_s + part * (high.ttft_s - low.ttft_s),
            low.promised_s + part * (high.promised_s - low.promised_s),
        )

    def tbt_with_s(self, context: int, num_more: int = 0) -> float:
        """Between tokens of a stream of this context, with num_more others sent meanwhile."""
        return self.tbt_s + num_more * self.tbt_per_stream_s + context * self.tbt_per_token_s


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """What one engine publishes, several times a second and at once when `state` changes;
    `Publisher.snapshot` makes it from a core.

    engine_id: never used again for another engine.
    sequence: counts the engine's snapshots; a smaller one that arrives later is dropped.
    num_received: how many requests of the front that gets this snapshot the engine had taken in,
        since their connection began: those that it sent later are not in the figures below.
    num_prefill_tokens: known tokens still to be computed, of all that wait or prefill.
    num_decode_tokens: context tokens of the streams that decode.
    num_output_tokens_left: at most so many tokens are still to be generated by those that run.
    num_prefilled_tokens: computed since the engine began.
    tokens_per_s: running mean of computed tokens a second; 0.0 before any step.
    least_slack_s: the tightest objective minus the gap that steps keep beside one stream more
        (infinite: there is no objective); below 0 a promise would break.
    tbt_s, ttft_s: the deployment's objectives, for a request without its own.
    adapters: slot and folder of each that it loaded at its start.
    """

    engine_id: str
    bits: BitClass
    state: EngineState
    sequence: int
    num_received: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_output_tokens_left: int = 0
    num_prefilled_tokens: int = 0
    tokens_per_s: float = 0.0
    least_slack_s: float = math.inf
    num_blocks: int = 1
    num_free_blocks: int = 1
    block_size: int = 16
    max_requests: int = 1
    max_model_len: int = 1
    tbt_s: float | None = None
    ttft_s: float | None = None
    outlook: Outlook = field(default_factory=Outlook)
    adapters: tuple[tuple[int, str], ...] = ()

    @property
    def num_live(self) -> int:
        """Requests that run or wait."""
        return self.num_running + self.num_waiting

    @property
    def accepts(self) -> bool:
        return self.state is EngineState.SERVING


@dataclass(frozen=True, slots=True)
class PrefixUpdate:
    """What changed in an engine's prefix cache since its last update: short digests of full blocks.

    whole: `added` is all that it holds (a first message, or what was lost is made good).
    """

    engine_id: str
    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, or a stream that moves, as routing sees it.

    num_tokens: known tokens: the prompt, and what an earlier life has delivered.
    max_tokens: most tokens still to be generated.
    prefix: short digests of the known tokens' full blocks, in order (`short_digests`).
    session: requests of equal sessions belong to one conversation; "": none known.
    bits: only engines of this class give the stream's own bytes (a move); None: any will do.
    refused_by: engines not to be asked again.
    adapter: slot and folder: only engines that have it there give the stream's bytes; None: none.
    """

    num_tokens: int
    max_tokens: int
    objective: Objective = field(default_factory=Objective)
    prefix: tuple[bytes, ...] = ()
    session: str = ""
    tenant: str = ""
    bits: BitClass | None = None
    refused_by: frozenset[str] = frozenset()
    adapter: tuple[int, str] | None = None


def short_digests(digests: list[bytes]) -> tuple[bytes, ...]:
    """Digests of `actors.scheduling.state` as they travel."""
    return tuple([digest[:SHORT_DIGEST_BYTES] for digest in digests])
