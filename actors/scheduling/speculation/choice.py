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

    start: position of its known token. rate: of acceptance. most: drafts.
    """

    start: int
    rate: float
    most: int


def choose(
    cost_model: StepTimePredictor | None,
    shape: StepShape,
    wishes: Sequence[Wish],
    most: int,
    pass_s: float = 0.0,
) -> list[int]:
    """The drafts of each request, `most` together: the likeliest, as many as raise the expected
    tokens per predicted second of a step of this shape; none if they do not raise it enough.

    Tokens of prompts count like those of decodes, so that drafts lengthen a step with prefill only
    where they compute more per second than the prefill itself. pass_s: time that the draft model
    takes for one draft of each. Without a cost model only the chances count.
    """
    drafts = likeliest([(wish.rate, wish.most) for wish in wishes], most)
    if cost_model is None or not drafts:
        return _counts(drafts, len(wishes))
    gained, total = [0.0], 0.0
    for chance, _, _ in drafts:
        total -= chance
        gained.append(total)
    num_tokens, step_s = shape.num_tokens, cost_model.step_s

    def rate_of(number: int) -> float:
        counts = _counts(drafts[:number], len(wishes))
        with_drafts_s = step_s(_with_drafts(shape, wishes, counts)) + max(counts) * pass_s
        return (num_tokens + gained[number]) / with_drafts_s

    number, rate = best_number(len(drafts), rate_of)
    least = (num_tokens + _LEAST_GAIN * shape.num_decodes) / step_s(shape)
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
    slices = [(wish.start, 1 + count) for wish, count in zip(wishes, counts, strict=True) if count]
    context = shape.decode_context_tokens - sum([start + 1 for start, _ in slices])
    return shape._replace(
        num_decodes=shape.num_decodes - len(slices),
        decode_context_tokens=context,
        prefills=(*slices, *shape.prefills),
    )


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


def least_rate(gain: float, most: int) -> float:
    """The acceptance rate from which `most` drafts bring so many tokens; 1.0 if they never do.

    >>> round(least_rate(0.5, 1), 2), round(least_rate(0.75, 2), 2), least_rate(3.0, 2)
    (0.5, 0.5, 1.0)
    """
    low, high = 0.0, 1.0
    if gain >= most:
        return high
    for _ in range(12):
        rate = (low + high) / 2
        if sum([rate**depth for depth in range(1, most + 1)]) < gain:
            low = rate
        else:
            high = rate
    return high
