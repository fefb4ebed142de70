"""Verifies a step's drafts: a draft is accepted if it and all before it equal the draws; and where
the drafts begin that a step asks for.

A draw depends on (seed, position) and on the tokens before it alone. After
drafts that equal the draws of their positions it is therefore the draw of a separate step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from actors.scheduling.plan import StepPlan, StepResult, TokenLogprobs
from actors.stage.host_batch import HostBatch


def drawing_rows(
    plan: StepPlan, host: HostBatch, sampling: NDArray[np.intp]
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.int64]]:
    """The draws of a step: (slice, row along T, position of the token) of each.

    sampling: the slices that sample: each in its last row, and before each of its drafts.
    """
    counts_S = np.ones(len(sampling), np.intp)
    num_drafts = {request_id: len(tokens) for request_id, tokens in plan.drafts}
    for k, i in enumerate(sampling.tolist()):
        counts_S[k] += num_drafts.get(plan.slices[i][0], 0)
    slices_N = np.repeat(sampling, counts_S)
    ends_N = np.cumsum(counts_S)
    behind_N = np.repeat(ends_N, counts_S) - np.arange(len(slices_N)) - 1  # draws after it
    rows_N = host.query_starts_S1[1:][slices_N] - 1 - behind_N
    positions_N = host.ends_S[slices_N] - behind_N
    return slices_N, rows_N.astype(np.intp), positions_N.astype(np.int64)


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
