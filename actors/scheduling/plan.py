"""The plan of one step, sent from the core to the stages, and their answer.

A step is a tuple of slices. There is no phase flag anywhere: a decode is a slice of one token.
Stages mirror request state, so a plan carries only what changed since the last one.

If a stage raises an error in a step, every request of that step has failed. Until such a request is
started again, its slices in later steps already in flight may get any token or raise as well, but
must write no KV.

What is made once per token is a plain tuple: `SliceRow` here, `OutputRow` in events. A NamedTuple
takes longer to build, and has to be built again behind every connection.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from actors.scheduling.request import SamplingParams

SliceRow = tuple[int, int, int, bool]  # the fields of a `Slice`


class Slice(NamedTuple):
    """Compute tokens [start, start + num_tokens) of one request, its drafts included.

    samples: the slice reaches the end of the known sequence, so the last stage draws the
    next token (for position start + num_tokens) from its last row. Never set for pooling
    requests: they answer `pooled` when a slice reaches their last prompt token.
    """

    request_id: int
    start: int
    num_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True)
class RequestStart:
    """A request that enters the stages, or enters again after preemption or a rebuild.

    tokens: prompt followed by every output token known so far.
    block_ids: KV blocks in order; may hold cached prefix blocks already filled.
    adapter: as in `Request`. state_row: of a saved state with which it begins, or None.
    """

    request_id: int
    tokens: tuple[int, ...]
    num_prompt_tokens: int
    block_ids: tuple[int, ...]
    sampling: SamplingParams
    pooling: str | None = None
    adapter: int = 0
    state_row: int | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Stages apply swap_out, swap_in and copies, then released, started, trimmed,
    new_blocks and fed, and then compute the slices with their drafts.

    released: requests to forget (finished, aborted or preempted); an id that the stage does not
        know is ignored (a failed step may or may not have applied it).
    swap_out / swap_in: (device block, host block) / (host block, device block) copies.
    copies: (source, destination) device block copies (copy-on-write).
    started: requests that enter; they replace older state with the same id.
    new_blocks: (request_id, block ids appended to its table); one entry per request.
    trimmed: (request_id, number of blocks that its table keeps): the others were for
        rejected drafts. Only together with new blocks of the same request.
    drafts: (request_id, tokens) guessed to follow the known ones; the slice ends with them. The
        last stage draws after the known token and after each draft, up to the first that differs.
    drafts_asked: (request_id, number) of drafts wanted of the last stage for the tokens after the
        one that it draws in this step.
    saved_states: (request_id, position, row): the states of a request's first `position` tokens,
        which its slice reaches, are kept in a row of those that requests may begin with.
    adapter_load_s: for how long each rank may load adapters beside the step.
    fed: (request_id, position, token) outputs the first stage has not seen because another
        process sampled them. Empty with a single stage: it keeps what it samples.
    slices: the work, decodes first.
    """

    step_id: int
    slices: tuple[SliceRow, ...]
    released: tuple[int, ...] = ()
    swap_out: tuple[tuple[int, int], ...] = ()
    swap_in: tuple[tuple[int, int], ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    started: tuple[RequestStart, ...] = ()
    new_blocks: tuple[tuple[int, tuple[int, ...]], ...] = ()
    fed: tuple[tuple[int, int, int], ...] = ()
    trimmed: tuple[tuple[int, int], ...] = ()
    drafts: tuple[tuple[int, tuple[int, ...]], ...] = ()
    drafts_asked: tuple[tuple[int, int], ...] = ()
    saved_states: tuple[tuple[int, int, int], ...] = ()
    adapter_load_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum([num_tokens for _, _, num_tokens, _ in self.slices])

    @property
    def named_slices(self) -> tuple[Slice, ...]:
        """The slices with their fields named, for readers that need not be fast."""
        return tuple(map(Slice._make, self.slices))


class StepShape(NamedTuple):
    """The shape of a step, which determines its time.

    num_decodes: slices of one token that continue a generation; longer ones are prefills.
    decode_context_tokens: KV positions those decodes attend to, summed (their own included).
    prefills: (start, num_tokens) of every other slice.
    beside_move: KV moves to or from the second tier meanwhile.
    num_drafted: how many of the prefills, the first ones, are decodes: with drafts, or with known
        tokens that are computed again.
    """

    num_decodes: int = 0
    decode_context_tokens: int = 0
    prefills: tuple[tuple[int, int], ...] = ()
    beside_move: bool = False
    num_drafted: int = 0

    @property
    def num_tokens(self) -> int:
        if not self.prefills:
            return self.num_decodes
        return self.num_decodes + sum([n for _, n in self.prefills])

    @property
    def num_decode_tokens(self) -> int:
        return self.num_decodes + sum([n for _, n in self.prefills[: self.num_drafted]])


def logit_rows(max_requests: int) -> int:
    """Most rows that one step may sample: the stages reserve memory for their logits."""
    return max(max_requests, 32)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one chosen token and of the likeliest alternatives, best first."""

    token: int
    logprob: float
    rank: int  # 1: the likeliest
    top: tuple[tuple[int, float], ...]


NOT_FINITE = -1  # of a draw: weights or the request's activations overflow
DEAD_END = -3  # of a draw: the request's grammar allows no token there
SLOW_GRAMMAR = -4  # of a draw: what the request's grammar allows takes too long to find


@dataclass(frozen=True, slots=True)
class StepResult:
    """The answer of the last stage.

    tokens: (request_id, token) for every slice with `samples`, in slice order; NOT_FINITE,
        DEAD_END or SLOW_GRAMMAR in the place of a token that could not be drawn, here and in
        extra_tokens.
    extra_tokens: (request_id, tokens) after that token, one for each accepted draft. logprobs has
        one entry per token, in order.
    logprobs / prompt_logprobs / pooled: only for requests that asked; prompt_logprobs carries
        (request_id, first position, one entry per position).
    stage_times_s: (start, end) per stage on the host's monotonic clock, without `drafting_s`.
    drafts_offered: (request_id, tokens) guessed to follow its last token, of those asked for.
    drafting_s: time taken by them; draft_pass_s: by one pass of the draft model over one token of
        each, 0.0 if there was none.
    """

    step_id: int
    tokens: tuple[tuple[int, int], ...]
    logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()
    prompt_logprobs: tuple[tuple[int, int, tuple[TokenLogprobs, ...]], ...] = ()
    pooled: tuple[tuple[int, tuple[float, ...]], ...] = ()
    stage_times_s: tuple[tuple[float, float], ...] = ()
    extra_tokens: tuple[tuple[int, tuple[int, ...]], ...] = ()
    drafts_offered: tuple[tuple[int, tuple[int, ...]], ...] = ()
    drafting_s: float = field(default=0.0, compare=False, repr=False)
    draft_pass_s: float = field(default=0.0, compare=False, repr=False)
