"""How many drafts each request of a step gets: the likeliest first, as long as they pay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from actors.scheduling.interfaces import StepTimePredictor
from actors.scheduling.plan import StepShape

LEAST_CHANCE = 0.25  # of being reached and right, for a draft to be worth its compute
_LEAST_GAIN = 0.05  # of the decodes' tokens: less is not worth a step that is not planned ahead


class Wish(NamedTuple):
    """The drafts that one request could use.

    start: of its slice. rate: of acceptance. most: drafts. num_known: tokens before them.
    """

    start: int
    rate: float
    most: int
    num_known: int = 1


def choose(
    cost_model: StepTimePredictor | None,
    shape: StepShape,
    wishes: Sequence[Wish],
    most: int,
    pass_s: float = 0.0,
    goes_back: bool = False,
) -> list[int]:
    """The drafts of each request, `most` together: the likeliest, as many as raise the expected
    tokens per predicted second of a step of this shape; none if they do not raise it enough.

    Tokens of prompts count like those of decodes, so that drafts lengthen a step with prefill only
    where they compute more per second than the prefill itself. pass_s: time that the draft model
    takes for one draft of each. goes_back: a slice with a wrong draft is computed again as far as
    it is right, in a later step, which is at most as long again. Without a cost model only the
    chances count.
    """
    drafts = likeliest([(wish.rate, wish.most) for wish in wishes], most)
    if cost_model is None or not drafts:
        return _counts(drafts, len(wishes))
    gained, total = [0.0], 0.0
    for chance, _, _ in drafts:
        total -= chance
        gained.append(total)
    step_s = cost_model.step_s
    # What the step itself computes again is no gain, and takes its time with drafts or without.
    base = _without_redone(shape)
    base_s, num_tokens, redone_s = step_s(base), base.num_tokens, 0.0
    if base is not shape:
        redone_s = max(0.0, step_s(shape) - base_s)

    def rate_of(number: int) -> float:
        counts = _counts(drafts[:number], len(wishes))
        with_drafts = _with_drafts(shape, wishes, counts)
        seconds = step_s(with_drafts)
        if goes_back:
            share = _share_redone(with_drafts.num_tokens - num_tokens, wishes, counts)
            seconds += share * max(0.0, seconds - base_s)
        return (num_tokens + gained[number]) / (seconds - redone_s + max(counts) * pass_s)

    number, rate = best_number(len(drafts), rate_of)
    least = (num_tokens + _LEAST_GAIN * base.num_decodes) / base_s
    if rate < least:
        return [0] * len(wishes)
    return _counts(drafts[:number], len(wishes))


def likeliest(wanted: Iterable[tuple[float, int]], most: int) -> list[tuple[float, int, int]]:
    """Drafts as (minus the chance that it is reached and right, its depth, index of the request),
    best first: of equal chances, those that come earlier in their request, then in the batch.

    wanted: acceptance rate and most drafts of each request. most: of all together.

    >>> [index for _, _, index in likeliest([(0.9, 2), (0.3, 2), (0.9, 1)], 9)]
    [0, 2, 0, 1]
    """
    drafts = []
    for index, (rate, count) in enumerate(wanted):
        chance = rate
        for depth in range(count):
            if chance < LEAST_CHANCE:
                break
            drafts.append((-chance, depth, index))
            chance *= rate
    drafts.sort()
    return drafts[:most]


def _counts(drafts: Iterable[tuple[float, int, int]], num_requests: int) -> list[int]:
    counts = [0] * num_requests
    for _, _, index in drafts:
        counts[index] += 1
    return counts


def _with_drafts(shape: StepShape, wishes: Sequence[Wish], counts: Sequence[int]) -> StepShape:
    slices, rest = list[tuple[int, int]](), list(shape.prefills)
    num_decodes, context = shape.num_decodes, shape.decode_context_tokens
    for (start, _, _, num_known), count in zip(wishes, counts, strict=True):
        if count:
            slices.append((start, num_known + count))
            if num_known > 1:
                rest.remove((start, num_known))
            else:
                num_decodes, context = num_decodes - 1, context - start - 1
    return shape._replace(
        num_decodes=num_decodes, decode_context_tokens=context, prefills=(*slices, *rest)
    )


def _without_redone(shape: StepShape) -> StepShape:
    """The step, did it compute no tokens again: its decodes of several tokens have one."""
    if not shape.num_drafted:
        return shape
    redone, rest = shape.prefills[: shape.num_drafted], shape.prefills[shape.num_drafted :]
    return shape._replace(
        num_decodes=shape.num_decodes + len(redone),
        decode_context_tokens=shape.decode_context_tokens + sum([s + n for s, n in redone]),
        prefills=rest,
        num_drafted=0,
    )


def _share_redone(num_more: int, wishes: Sequence[Wish], counts: Sequence[int]) -> float:
    """Of num_more tokens, which a step has in addition to one of each decode, the share that is
    expected to be computed again at most: all of each slice with a wrong draft."""
    redone = 0.0
    for wish, count in zip(wishes, counts, strict=True):
        if count:
            redone += (1.0 - wish.rate**count) * (wish.num_known - 1 + count)
    return redone / num_more


def best_number(most: int, value: Callable[[int], float]) -> tuple[int, float]:
    """A number from 1 to `most` at which `value` is highest, or nearly so, and that value.

    It looks at a number that grows with the logarithm of `most`: at halves of it while these are
    worth more, and then twice on both sides of the best: within a quarter of the best number where
    `value` rises and then falls.
    """
    best, top = most, value(most)
    while best > 1 and (half := value(best // 2)) > top:
        best, top = best // 2, half
    width = best // 2
    for _ in range(2):
        width //= 2
        for number in (best - width, best + width) if width else ():
            if number <= most and (found := value(number)) > top:
                best, top = number, found
                break
    return best, top


def least_rate(gain: float, most: int, goes_back: bool = False) -> float:
    """The acceptance rate from which `most` drafts bring so many tokens; 1.0 if they never do.
    goes_back: as of `choose`; if one is wrong, they must bring as many again.

    >>> round(least_rate(0.5, 1), 2), round(least_rate(0.75, 2), 2), least_rate(3.0, 2)
    (0.5, 0.5, 1.0)
    >>> round(least_rate(0.5, 1, goes_back=True), 2)
    0.67
    """
    low, high = 0.0, 1.0
    if gain >= most:
        return high
    for _ in range(12):
        rate = (low + high) / 2
        needed = gain * (2.0 - rate**most) if goes_back else gain
        if sum([rate**depth for depth in range(1, most + 1)]) < needed:
            low = rate
        else:
            high = rate
    return high
