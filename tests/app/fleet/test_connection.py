"""What a front's stream takes with it when it changes engines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from actors.scheduling.events import Refuse
from actors.scheduling.request import Request, SamplingParams
from app.engine_client.streams import Stream
from app.fleet.connection import FleetRequest


def engine(name: str) -> Any:
    return SimpleNamespace(engine_id=name, snapshot=None)


def test_what_an_engine_has_accepted_is_judged_by_no_limit_of_the_next() -> None:
    waiting = FleetRequest(Request(1, (5, 6), SamplingParams(9), 0.0), 0, Stream())
    waiting.place(engine("refuses"))
    waiting.refused_by["refuses"] = Refuse(1, "the queue is full", None, 1.0)
    waiting.place(engine("accepts"))
    assert not waiting.resumed().was_accepted  # no engine has taken it so far
    waiting.unplace(0.0)  # that engine dies before the first token
    waiting.place(engine("full"))
    assert waiting.resumed().was_accepted
    waiting.refused_by["full"] = Refuse(1, "the prompt is too long")
    waiting.place(engine("last"))
    assert waiting.resumed().was_accepted


def test_what_an_engine_has_begun_waits_at_no_other() -> None:
    """It may be refused nowhere for a wait that has ended."""
    waiting = FleetRequest(Request(1, (5, 6), SamplingParams(9), 0.0), 0, Stream())
    waiting.place(engine("first"))
    waiting.place(engine("second"))
    assert not waiting.resumed().has_started
    waiting.has_started = True
    for name in ("third", "fourth"):
        waiting.place(engine(name))
        assert waiting.resumed().has_started
