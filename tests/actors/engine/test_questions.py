"""What a scheduler answers about changes of its settings."""

from __future__ import annotations

from typing import Any

import pytest

from actors.transport.messages import Answer, Ask, RefusedSetting
from tests.actors.engine.paper_engine import Engine

FRONT = 3


def answer(engine: Engine, question: Any, changes: dict[str, Any]) -> Answer:
    engine.wires.sent.clear()
    engine.wires.receive(FRONT, Ask(1, question, (changes,)))
    ((peer, said),) = engine.wires.sent
    assert peer == FRONT
    assert isinstance(said, Answer)
    return said


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"policy": "vllm"}, None),
        ({"slo.tbt_ms": 50, "max_requests": 2}, None),
        ({"color": 1}, "color"),
        ({"max_requests": "many"}, "max_requests"),
        ({"token_budget": 1 << 20}, "token_budget"),
        ({"policy": "orca", "policy_options": {"color": 1}}, "policy_options"),
        ({"policy": "magic"}, "policy"),
        ({"scheduling.policy": "magic"}, "scheduling.policy"),
        ({"slo.tbt_ms": float("inf")}, "slo.tbt_ms"),
        ({"tbt_ms": -1}, "tbt_ms"),
        ({"order": "magic"}, "order"),
        ({"budget": "adaptive", "slo.tbt_ms": 50}, "budget"),  # it needs a cost model
        ({"admission": "predictive"}, "admission"),
    ],
)
def test_a_check_of_changes_says_what_making_them_would(
    changes: dict[str, Any], param: str | None
) -> None:
    engine = Engine()
    before = engine.core.config
    said = answer(engine, "try_changes", changes)
    assert engine.core.config is before
    assert said == answer(engine, "reconfigure", changes)
    assert said.failure is None
    if param is None:
        assert said.value is None
    else:
        assert isinstance(said.value, RefusedSetting)
        assert said.value.param == param
        assert said.value.message.startswith(f"{param}: ")


@pytest.mark.parametrize("name", [None, "engine"])
def test_its_owner_learns_how_many_fronts_it_has(name: str | None) -> None:
    engine = Engine(engine_id=name)
    engine.stages.standby, engine.stages.pids = None, []
    engine.wires.receive(FRONT, Ask(1, "status"))
    _, said = engine.wires.sent[-1]
    assert said.value["num_fronts"] == (0 if name is None else engine.wires.num_fronts)
