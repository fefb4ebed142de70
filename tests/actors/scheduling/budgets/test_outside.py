"""What is left of an objective for the way to the client."""

from __future__ import annotations

import pytest

from actors.scheduling.budgets.outside import FADES, MOST_LEARNT, TimeOutside, WayToClient
from actors.scheduling.cost.model import CostModel
from actors.scheduling.cost.online import OnlineCostModel
from actors.scheduling.plan import StepShape


def test_the_largest_of_three_is_left() -> None:
    way = WayToClient(headroom=0.04, given_s=0.003)
    assert way.share(0.1) == 0.04
    assert way.share(0.05) == pytest.approx(0.06)
    assert way.share(0.01) == pytest.approx(0.1), "a tenth at most of what is given"
    way.took(0.012)
    assert way.share(0.1) == pytest.approx(0.12)
    assert way.share(0.02) == MOST_LEARNT, "steps must be possible"


def test_the_slowest_way_counts_and_fades() -> None:
    way = WayToClient(headroom=0.04, given_s=0.0)
    for seconds in (0.02, 0.004):  # of two replicas
        way.took(seconds)
    assert way.learnt_s == pytest.approx(0.02 - FADES * 0.016)
    for _ in range(60):
        way.took(0.004)
    assert way.learnt_s == pytest.approx(0.004, rel=0.01)


def test_the_stages_of_a_pipeline_hide_what_is_outside() -> None:
    model = CostModel("m", ((1, 0.01), (2048, 0.2)), kv_tokens=60_000, max_model_len=4096)
    outside = TimeOutside(OnlineCostModel(model))
    outside.answered(StepShape(1, 1), 0.01)
    assert outside.seconds == 0.0
