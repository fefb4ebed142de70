"""What a replica refuses by itself: only what the scheduler has said it would, and as it would."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from actors.scheduling.events import MayReturn, Refuse
from actors.scheduling.request import Objective, Request, SamplingParams
from app.engine_client.client import GenerationRequest
from app.engine_client.foreseen import ForeseenRefusals

NONE, DEFAULT = Objective(), Objective(ttft_s=2.0)
REFUSAL = Refuse(7, "overloaded", None, 3.0, closed_s=0.2, each_s=0.5)


def asks(num_tokens: int = 100, objective: Objective = NONE, **others: Any) -> GenerationRequest:
    prompt = (1,) * num_tokens
    return GenerationRequest("r", prompt, SamplingParams(8), objective=objective, **others)


def refused(num_tokens: int = 100, objective: Objective = NONE) -> Request:
    return Request(7, (1,) * num_tokens, SamplingParams(8), 0.0, objective=objective)


@pytest.fixture
def foreseen() -> ForeseenRefusals:
    found = ForeseenRefusals()
    found.note(REFUSAL, refused(), DEFAULT, 10.0)
    return found


@pytest.mark.parametrize(
    ("num_tokens", "objective", "now_s", "is_refused"),
    [
        (100, NONE, 10.1, True),
        (5000, NONE, 10.1, True),
        (99, NONE, 10.1, False),  # a shorter one may fit
        (100, NONE, 10.2, False),  # by now the engine may have room
        (100, Objective(ttft_s=1.0), 10.1, True),
        (100, Objective(ttft_s=3.0), 10.1, False),  # it may wait for longer
    ],
)
def test_what_is_refused(
    foreseen: ForeseenRefusals,
    num_tokens: int,
    objective: Objective,
    now_s: float,
    is_refused: bool,
) -> None:
    error = foreseen.find(asks(num_tokens, objective), DEFAULT, now_s)
    assert (error is not None) == is_refused
    assert [one.work_s for one in foreseen.pop_turned_away()] == [0.5] * is_refused


@pytest.mark.parametrize(
    ("others", "is_refused"),
    [
        ({"priority": -1}, True),
        ({"priority": 1}, False),  # a batch's refusal refuses no live request
        ({"tenant": "another"}, False),  # a fair order may serve it first
    ],
)
def test_who_may_be_served_before_is_not_refused(
    foreseen: ForeseenRefusals, others: dict[str, Any], is_refused: bool
) -> None:
    assert (foreseen.find(asks(**others), DEFAULT, 10.1) is not None) == is_refused


def test_without_an_objective_only_those_without_one_are_refused() -> None:
    foreseen = ForeseenRefusals()
    foreseen.note(REFUSAL, refused(), NONE, 10.0)
    assert foreseen.find(asks(), NONE, 10.1) is not None
    foreseen = ForeseenRefusals()
    foreseen.note(REFUSAL, refused(objective=DEFAULT), NONE, 10.0)
    assert foreseen.find(asks(), NONE, 10.1) is None


def test_each_is_to_return_after_those_refused_before(foreseen: ForeseenRefusals) -> None:
    errors = [foreseen.find(asks(), DEFAULT, 10.0 + k / 10) for k in range(2)]
    waits_s = [error.retry_after_s for error in errors if error is not None]
    assert waits_s == pytest.approx([3.5, 3.9])  # from now
    assert str(errors[0]) == REFUSAL.message
    key = MayReturn.key_of("", (1,) * 100)
    assert foreseen.pop_turned_away() == [
        (key, 0.5, pytest.approx(3.5), "", 0),
        (key, 0.5, pytest.approx(3.9), "", 0),
    ]
    assert foreseen.pop_turned_away() == []


@pytest.mark.parametrize(
    ("now_s", "prompt", "is_refused"),
    [
        (12.9, (1,) * 100, False),
        (12.9, (2,) * 100, True),  # not the one that was refused
        (11.0, (1,) * 100, True),  # it was to wait for three seconds
    ],
)
def test_who_returns_when_told_is_left_to_the_scheduler(
    foreseen: ForeseenRefusals, now_s: float, prompt: tuple[int, ...], is_refused: bool
) -> None:
    foreseen.note(replace(REFUSAL, request_id=8), refused(90), DEFAULT, now_s - 0.1)
    asked = GenerationRequest("r", prompt, SamplingParams(8))
    assert (foreseen.find(asked, DEFAULT, now_s) is not None) == is_refused


@pytest.mark.parametrize("changes", [{"closed_s": 0.0}, {"retry_after_s": None}])
def test_a_refusal_that_says_nothing_of_others_closes_nothing(changes: dict[str, None]) -> None:
    foreseen = ForeseenRefusals()
    foreseen.note(replace(REFUSAL, **changes), refused(), DEFAULT, 10.0)
    assert foreseen.find(asks(), DEFAULT, 10.0) is None
