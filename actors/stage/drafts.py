"""Verifies a step's drafts: a draft is accepted if it and all before it equal the draws; and where
the drafts begin that a step asks for.

A draw depends on (seed, position) and on the tokens before it alone. After
drafts that equal the draws of their positions it is therefore the draw of a separate step.

Shape suffixes: N draws, S slices, T tokens of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from actors.scheduling.plan import StepPlan, StepResult, TokenLogprobs
from actors.stage.host_batch import HostBatch


class Draws(NamedTuple):
    """The draws of a step, in the order of its slices: a slice's are in its last row and, before
    that, in the row of each of its drafts. drafted_N: of slices with drafts.

    slices_N: which slice. rows_N: along T. positions_N: of the token that is drawn.
    """

    slices_N: NDArray[np.intp]
    rows_N: NDArray[np.intp]
    positions_N: NDArray[np.int64]
    drafted_N: NDArray[np.bool_]


def draws_of(plan: StepPlan, host: HostBatch) -> Draws:
    """What a step draws: something for each slice that samples, and for each of its drafts."""
    sampling = np.flatnonzero(host.samples_S)
    ends_S1, positions_S = host.query_starts_S1, host.ends_S.astype(np.int64)
    if not plan.drafts:
        last_rows_S = ends_S1[sampling + 1].astype(np.intp) - 1
        drafted_S = np.zeros(len(sampling), np.bool_)
        return Draws(sampling, last_rows_S, positions_S[sampling], drafted_S)
    num_drafts = {request_id: len(tokens) for request_id, tokens in plan.drafts}
    counts_S = 1 + np.array([num_drafts.get(plan.slices[i][0], 0) for i in sampling], np.intp)
    slices_N = np.repeat(sampling, counts_S)
    behind_N = np.repeat(np.cumsum(counts_S), counts_S) - np.arange(len(slices_N)) - 1
    rows_N = ends_S1[slices_N + 1].astype(np.intp) - 1 - behind_N
    drafted_N = np.repeat(counts_S > 1, counts_S)
    return Draws(slices_N, rows_N, positions_S[slices_N] - behind_N, drafted_N)


def accept(
    step_id: int,
    drawn: Sequence[tuple[int, int]],
    logprobs: Sequence[tuple[int, TokenLogprobs]],
    drafts: Mapping[int, tuple[int, ...]],
) -> StepResult:
    """The result of a step with drafts. drawn, logprobs: of each draw, a slice's in order.

    >>> accept(0, [(1, 7), (1, 8), (1, 9)], (), {1: (7, 5)})
    StepResult(step_id=0, tokens=((1, 7),), logprobs=(), prompt_logprobs=(), pooled=(), \
stage_times_s=(), extra_tokens=((1, (8,)),), drafts_offered=())
    """
    of_id: dict[int, list[int]] = {}
    for request_id, token in drawn:
        of_id.setdefault(request_id, []).append(token)
    judged: dict[int, list[TokenLogprobs]] = {}
    for request_id, entry in logprobs:
        judged.setdefault(request_id, []).append(entry)
    extra_tokens: list[tuple[int, tuple[int, ...]]] = []
    for request_id, tokens in of_id.items():
        num_accepted = 0
        for draft, token in zip(drafts.get(request_id, ()), tokens, strict=False):
            if draft != token:
                break
            num_accepted += 1
        if num_accepted:
            extra_tokens.append((request_id, tuple(tokens[1 : 1 + num_accepted])))
        del tokens[1 + num_accepted :], judged.get(request_id, [])[1 + num_accepted :]
    return StepResult(
        step_id,
        tuple((request_id, tokens[0]) for request_id, tokens in of_id.items()),
        tuple((i, entry) for i, entries in judged.items() for entry in entries),
        extra_tokens=tuple(extra_tokens),
    )


class DraftOrder(NamedTuple):
    """Drafts wanted of a request: at most `most`, after the token at position `last`, the newest
    that is drawn."""

    request_id: int
    last: int
    most: int


def asked(plan: StepPlan, result: StepResult) -> list[DraftOrder]:
    """The drafts that a step asks for, in the order of its slices."""
    counts, drafts = dict(plan.drafts_asked), dict(plan.drafts)
    extra = dict(result.extra_tokens)
    found = []
    for request_id, start, length, samples in plan.slices:
        if samples and request_id in counts:
            num_rejected = len(drafts.get(request_id, ())) - len(extra.get(request_id, ()))
            found.append(DraftOrder(request_id, start + length - num_rejected, counts[request_id]))
    return found
