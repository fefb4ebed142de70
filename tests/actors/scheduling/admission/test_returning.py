"""Places of refused requests that may return: who has one, for how long, how much they count."""

from __future__ import annotations

import heapq
import random
import subprocess
import sys
from collections.abc import Sequence

import pytest

from actors.scheduling.admission.predictive import PredictiveAdmission
from actors.scheduling.admission.returning import MOST_PLACES, Place, Returning
from actors.scheduling.build import build_core
from actors.scheduling.cost.mix import Mix
from actors.scheduling.cost.model import CostModel
from actors.scheduling.events import Execute, MayReturn, Refuse, StepDone, Submit
from actors.scheduling.plan import StepResult
from actors.scheduling.request import Request, SamplingParams
from tests.actors.scheduling.modeled import modeled

MODEL = CostModel("m", ((1, 0.01), (2048, 0.2)), kv_tokens=600_000, max_model_len=4096)
QPS = 30.0  # of prompts of 200 to 600 tokens, of which a quarter is too much


def returning(*waits_s: float, share: float = 1.0) -> Returning:
    """Refused at 100 s, of a second of work each; keys from 0."""
    found = Returning(share)
    for key, wait_s in enumerate(waits_s):
        found.refused(MayReturn(key, 1.0, wait_s), 100.0)
    return found


@pytest.mark.parametrize(
    ("after_s", "has_place"),
    [(0.2, False), (2.9, False), (3.0, True), (4.0, True), (6.2, True), (6.3, False)],
)
def test_who_returns_about_when_told_has_a_place_once(after_s: float, has_place: bool) -> None:
    found = returning(4.0)
    assert (found.take(0, 100.0 + after_s) is not None) == has_place
    assert found.take(0, 100.0 + after_s) is None
    assert found.ahead_s(100.0 + after_s, "") == 0.0


def test_those_before_a_place_are_ahead_of_it() -> None:
    found = returning(4.0, 8.0, 12.0)
    assert found.ahead_s(100.0, "") == 3.0
    place = found.take(1, 106.2)
    assert place is not None
    assert found.ahead_s(106.2, "", place=place) == pytest.approx(1.0)
    assert found.ahead_s(106.2, "") == pytest.approx(2.0)
    assert found.ahead_s(120.0, "") == 0.0  # all the others are given up


def test_equal_requests_have_a_place_each() -> None:
    found = returning()
    for wait_s in (4.0, 8.0):
        found.refused(MayReturn(7, 1.0, wait_s), 100.0)
    assert found.take(7, 104.0) is not None
    assert found.ahead_s(104.0, "") == pytest.approx(1.0)
    assert found.take(7, 108.0) is not None
    assert found.take(7, 108.0) is None


def test_the_share_that_returns_is_learned() -> None:
    found = returning(*[1.0] * 40, share=0.0)
    assert found.ahead_s(100.0, "") == pytest.approx(40.0)
    for key in range(20):
        assert found.take(key, 101.0) is not None
    assert found.share > 0.85
    assert found.ahead_s(110.0, "") == 0.0
    assert found.share < 0.15  # the other twenty never came


def test_one_request_for_several_outputs_has_as_many_places() -> None:
    found = returning()
    for _ in range(3):
        assert found.take(7, 100.0) is None
        found.refused(MayReturn(7, 1.0, 4.0), 100.0)
    assert found.share == 1.0
    assert all(found.take(7, 104.0) for _ in range(3))
    assert not found


def test_places_are_limited() -> None:
    found = returning(*[8.0] * (MOST_PLACES + 5))
    assert len(found) == MOST_PLACES
    assert found.take(0, 108.0) is not None
    found.refused(MayReturn(-1, 1.0, 8.0), 108.0)
    found.refused(MayReturn(-2, 1.0, 8.0), 108.0)
    assert found.take(-1, 116.0) is not None
    assert found.take(-2, 116.0) is None


def test_those_who_do_not_wait_are_waited_for_by_nobody() -> None:
    found = returning()
    for number in range(40):
        found.refused(MayReturn(7, 1.0, 60.0), 100.0 + number)
        assert found.take(7, 101.0 + number) is None
    assert found.share < 0.02


def test_nine_of_ten_who_return_are_to_be_served() -> None:
    found = returning(8.0, 8.0)
    for _ in range(8):
        found.judged(is_served=False)
    assert found.ahead_s(100.0, "") == pytest.approx(2.0 * 1.05**8)
    for number in range(100):
        found.judged(is_served=number % 10 != 0)
    assert 1.3 < found.stretch < 1.6
    for number in range(2000):
        found.judged(is_served=number % 20 != 0)
    assert found.stretch < 1.1


def test_those_count_for_their_tenant_and_for_no_higher_priority() -> None:
    found = returning(8.0)
    found.refused(MayReturn(1, 1.0, 8.0, "a", priority=-1), 100.0)  # a batch's
    found.refused(MayReturn(2, 1.0, 8.0, "a"), 100.0)
    waits_s = [found.ahead_s(100.0, "a", priority) for priority in (1, 0, -1)]
    assert waits_s == [0.0, 1.0, 2.0]
    place = found.take(0, 108.0)
    assert found.ahead_s(108.0, "a", 0, place) == 0.0  # they are not before it
    assert found.ahead_s(108.0, "b", 0) == 0.0


def test_a_key_is_the_same_in_every_process() -> None:
    code = "from actors.scheduling.events import MayReturn; print(MayReturn.key_of('t', (1, 2)))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    key_of = MayReturn.key_of
    assert int(told.stdout) == key_of("t", (1, 2)) == key_of("t", [1, 2])
    assert len({key_of("t", (1, 2)), key_of("u", (1, 2)), key_of("t", (2, 1))}) == 3


class Unknown(Returning):
    """As if nobody returned."""

    def ahead_s(
        self, now_s: float, tenant: str, priority: int = 0, place: Place | None = None
    ) -> float:
        return 0.0

    def take(self, key: int, now_s: float) -> Place | None:
        return None


class Service:
    """A core whose steps take as long as predicted. known: whether it knows who returns."""

    def __init__(self, known: bool) -> None:
        self.core = build_core(modeled(MODEL, admission="predictive", ttft_s=2.0, max_requests=64))
        self.now_s, self._number = 0.0, 0
        self._due: list[tuple[float, Execute]] = []
        admission = self.core.limits.admission
        assert isinstance(admission, PredictiveAdmission)
        if not known:
            admission._returning = Unknown()

    def submit(self, prompt: tuple[int, ...]) -> Refuse | None:
        self._number += 1
        request = Request(self._number, prompt, SamplingParams(2), self.now_s)
        out = self.core.handle(Submit(request), self.now_s)
        self._begin(out)
        return next((one for one in out if isinstance(one, Refuse)), None)

    def run_until(self, time_s: float) -> None:
        while self._due and self._due[0][0] <= time_s:
            self.now_s, step = self._due.pop(0)
            tokens = tuple((s.request_id, 9) for s in step.plan.named_slices if s.samples)
            self._begin(
                self.core.handle(StepDone(StepResult(step.plan.step_id, tokens)), self.now_s)
            )
        self.now_s = time_s

    def _begin(self, out: Sequence[object]) -> None:
        for one in out:
            if isinstance(one, Execute):
                begins_s = max(self.now_s, self._due[-1][0] if self._due else 0.0)
                self._due.append((begins_s + MODEL.stage_s(Mix.of(one.plan.slices)), one))


def shares(seed: int, returns: bool, known: bool = True) -> tuple[float, float]:
    """Of a load above what can be served: the share of those accepted who returned when told, and
    of all tokens accepted."""
    service, draws = Service(known), random.Random(seed)
    arrivals: list[tuple[float, int, tuple[int, ...]]] = []
    time_s = 0.0
    for number in range(int(25 * QPS)):
        time_s += draws.expovariate(QPS)
        arrivals.append((time_s, 0, (number,) * draws.randrange(200, 600)))
    heapq.heapify(arrivals)
    returned, tokens = [], [0, 0]
    while arrivals:
        time_s, attempt, prompt = heapq.heappop(arrivals)
        service.run_until(time_s)
        refusal = service.submit(prompt)
        tokens[refusal is None] += len(prompt)
        if attempt:
            returned.append(refusal is None)
        elif refusal is not None and returns:
            assert refusal.retry_after_s is not None
            heapq.heappush(arrivals, (time_s + refusal.retry_after_s, 1, prompt))
    return sum(returned) / max(1, len(returned)), tokens[True] / sum(tokens)


@pytest.mark.parametrize("seed", range(2))
def test_who_returns_when_told_is_served(seed: int) -> None:
    assert shares(seed, returns=True)[0] > 0.95
    assert shares(seed, returns=True, known=False)[0] < 0.8


@pytest.mark.parametrize("seed", range(2))
def test_who_never_returns_costs_nothing(seed: int) -> None:
    served = shares(seed, returns=False)[1]
    assert served > 0.97 * shares(seed, returns=False, known=False)[1]


def test_nothing_is_kept_of_those_whose_places_are_gone() -> None:
    """Neither of tenants, whose names clients choose, nor of one that never waits."""
    found = Returning(1.0)
    for number in range(5000):
        found.refused(MayReturn(number, 1.0, 1.0, f"tenant {number}"), 0.1 * number)
    assert len(found._work_s) == len(found._num_of) <= len(found) < 200
    hasty = Returning(1.0)
    for number in range(5000):
        hasty.refused(MayReturn(7, 1.0, 3600.0), float(number))
        hasty.take(7, number + 0.5)
    assert len(hasty._by_end) < 300
