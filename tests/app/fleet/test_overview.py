"""The status of a fleet: what is added up, and a row for each engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from actors.fleet.snapshot import EngineSnapshot
from app.fleet.connection import Connection
from app.fleet.overview import StreamMoves, overview
from tests.actors.fleet.pictures import snapshot


@dataclass(frozen=True)
class Entry:
    node: str = "node"
    pid: int = 7


@dataclass(eq=False)
class Known:
    """The fields of a `Connection` that the status shows."""

    engine_id: str
    snapshot: EngineSnapshot | None
    entry: Entry = field(default_factory=Entry)
    open_requests: dict[int, Any] = field(default_factory=dict)


def test_counts_are_added_up_and_each_engine_has_a_row() -> None:
    published = snapshot("b")
    engines = [Known("a", None), Known("b", published, open_requests={1: None})]
    answers = {
        cast(Connection, known): {"num_waiting": 2 + number, "pid": 40 + number, "step_budget": 64}
        for number, known in enumerate(engines)
    }
    found = overview(answers, StreamMoves())
    assert found["num_waiting"] == 5
    assert found["fleet"]["num_moves"] == 0
    starting, serving = found["engines"]
    assert (starting["id"], starting["pid"], "state" in starting) == ("a", 40, False)
    assert (serving["id"], serving["num_streams_here"]) == ("b", 1)
    assert serving["step_budget"] == 64
    assert serving["prefill_rate"] == published.outlook.prefill_rate
    assert serving["num_running"] == published.num_running
    assert serving["least_slack_s"] is None or serving["least_slack_s"] == published.least_slack_s


def test_an_idle_engine_computes_no_tokens_whatever_it_did_before() -> None:
    for num_running, shown in ((0, 0.0), (2, 70.0)):
        known = Known("a", snapshot("a", num_running=num_running, tokens_per_s=70.0))
        found = overview({cast(Connection, known): {}}, StreamMoves())
        assert found["engines"][0]["tokens_per_s"] == shown
