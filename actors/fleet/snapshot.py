"""The inputs of a fleet's decisions: snapshots that engines publish, and arrivals.

All of it is plain, frozen data, sent between processes and used by the simulator unchanged.
"""

from __future__ import annotations

import enum
import math
from bisect import bisect_left
from dataclasses import dataclass, field

from actors.scheduling.request import Objective

SHORT_DIGEST_BYTES = 8  # of a block's digest that are sent: enough to tell a fleet's blocks apart


class EngineState(enum.StrEnum):
    """
    STARTING ──> SERVING ──> DRAINING ──> (gone)
                    └──────────────────> (gone)
    """

    STARTING = "starting"  # takes no requests yet
    SERVING = "serving"
    DRAINING = "draining"  # takes no new requests; its streams finish or move


class Role(enum.StrEnum):
    """The part of a request's life that an engine takes."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    @property
    def decodes(self) -> bool:
        return self is not Role.PREFILL


@dataclass(frozen=True, slots=True)
class BitClass:
    """Engines of equal classes round alike, so a stream may move between them.

    All that decides how numbers are rounded, but for the batch. model names the weights, with their
    revision; tensor_ranks counts because it changes the order of partial sums; draw is the version
    of the sampling scheme, on which the text of a seed depends. batch_invariant: a token has the
    same bits in any batch. Otherwise two engines of a class may draw other tokens for a stream, as
    one of them may with other requests beside it.
    """

    model: str
    dtype: str
    backend: str
    instruction_set: str
    quantization: str = ""
    kv_dtype: str = ""
    tensor_ranks: int = 1
    draw: int = 1
    batch_invariant: bool = True


@dataclass(frozen=True, slots=True)
class OutlookPoint:
    """For a prompt of num_tokens to compute, submitted when the snapshot was taken. Seconds.

    ttft_s: median prediction of the time to its first token.
    promised_s: the tightest TTFT objective with which admission would accept it.
    """

    num_tokens: int
    ttft_s: float
    promised_s: float


@dataclass(frozen=True, slots=True)
class Outlook:
    """The prediction of the engine's admission, sampled: what a quote would say, without a call.

    It is interpolated linearly, and extrapolated past the last point. Tokens sent since the
    snapshot are added to the length of a new prompt, because they are computed first.

    tbt_s: between tokens, with one more stream of empty context beside the running ones.
    tbt_per_stream_s, tbt_per_token_s: what each further stream, and each token of its context, add.
    prefill_rate: prompt tokens a second that it could compute beside a single stream; 0.0: unknown.
    decode_share: share of the time of a step that the running streams take, beyond a single one's.
    lone_tbt_s: between tokens of a stream of empty context without the running ones; 0.0: unknown.
    """

    points: tuple[OutlookPoint, ...] = ()
    tbt_s: float = 0.0
    tbt_per_stream_s: float = 0.0
    tbt_per_token_s: float = 0.0
    prefill_rate: float = 0.0
    decode_share: float = 0.0
    lone_tbt_s: float = 0.0

    def at(self, num_tokens: int) -> tuple[float, float]:
        """(ttft_s, promised_s) of a prompt with `num_tokens` to compute, including work ahead.

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
    """An engine's published state, several times a second and whenever `state` changes.
    `Publisher.snapshot` makes it from a core.

    engine_id: never used again for another engine.
    sequence: counts the engine's snapshots; a smaller one that arrives later is dropped.
    num_received: requests received from this front since its connection began; those sent later are
        not in the figures below.
    num_prefill_tokens: known tokens still to be computed, of all that wait or prefill.
    num_decode_tokens: context tokens of the streams that decode.
    num_output_tokens_left: upper bound on the tokens that running requests still generate.
    num_prefilled_tokens: computed since the engine began.
    tokens_per_s: running mean of computed tokens a second; 0.0 before any step.
    least_slack_s: the tightest objective minus the gap that steps keep beside one stream more
        (infinite: there is no objective); below 0 the objective would be missed.
    tbt_s, ttft_s: the deployment's objectives, for a request without its own.
    adapters: slot of each loaded adapter, and its folder, or the key of one that was loaded live.
    caches_prefixes: it finds the KV of equal prefixes (`kv.prefix_cache`).
    num_saved_states: rows for states of the beginnings of prompts, where alone a request of a model
        with states may begin; None: its layers keep none.
    shares_kv: its streams' KV can be fetched by engines of equal bits (`kv.shared_cache_gib`).
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
    role: Role = Role.BOTH
    caches_prefixes: bool = True
    num_saved_states: int | None = None
    shares_kv: bool = False

    @property
    def num_live(self) -> int:
        """Requests that run or wait."""
        return self.num_running + self.num_waiting

    @property
    def accepts(self) -> bool:
        return self.state is EngineState.SERVING


@dataclass(frozen=True, slots=True)
class PrefixUpdate:
    """Changes of an engine's prefix cache since its last update: short digests of full blocks, of
    a model with states only of those behind which a request may begin.

    whole: `added` is the complete content (of a first message, or after a lost one).
    """

    engine_id: str
    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Arrival:
    """The routing data of a request, or of a stream that moves.

    num_tokens: known tokens: the prompt, and what was delivered before a move.
    max_tokens: most tokens still to be generated.
    prefix: short digests of the known tokens' full blocks, in order (`short_digests`); for a model
        with states those of the prompt without its last token, the last of which a state is kept.
    session: requests of equal sessions belong to one conversation; "": unknown.
    bits: the class of engines that continue the stream exactly (a move); None: any engine.
    refused_by: engines that are not tried again.
    adapter: one of `EngineSnapshot.adapters` that an engine must have; None: no adapter.
    has_begun: it is a stream, tokens of which have been delivered.
    expected_by: the engine that fetches its KV already; "": none does.
    expected: (engine, known tokens) of other streams that an engine expects so.
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
    has_begun: bool = False
    expected_by: str = ""
    expected: tuple[tuple[str, int], ...] = ()


def short_digests(digests: list[bytes]) -> tuple[bytes, ...]:
    """The digests of `actors.scheduling.state`, shortened for sending."""
    return tuple([digest[:SHORT_DIGEST_BYTES] for digest in digests])
