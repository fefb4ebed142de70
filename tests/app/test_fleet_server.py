"""What Serve asks of the replicas of a fleet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from actors.fleet.snapshot import EngineState
from app.fleet_server import Front, stats_of
from tests.actors.fleet.pictures import snapshot


@pytest.mark.parametrize("is_ready", [True, False])
@pytest.mark.parametrize("state", EngineState)
def test_an_engine_without_scheduler_is_not_told_of_as_serving(
    is_ready: bool, state: EngineState
) -> None:
    """Its last snapshot, which none replaces, is of a scheduler that served."""
    last = snapshot("a", state=state, num_running=3)
    engine: Any = SimpleNamespace(snapshot=last, is_ready=lambda: is_ready)
    stats = stats_of(engine, 5.0)
    assert stats["accepts"] == float(is_ready and state is EngineState.SERVING)
    assert (stats["num_running"], stats["time_s"]) == (3.0, 5.0)


def test_an_engine_that_has_not_begun_says_nothing() -> None:
    engine: Any = SimpleNamespace(snapshot=None, is_ready=lambda: False)
    assert stats_of(engine, 5.0) == {}


async def test_a_wrong_user_config_ends_no_front_that_serves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Serve kills a running replica that refuses, with its streams; one that starts may refuse."""
    front = SimpleNamespace(is_serving=False)
    reconfigure = Front.func_or_class.reconfigure
    await reconfigure(front, None, rank=0)
    await reconfigure(front, {"policy": "vllm"}, rank=0)
    assert "belongs to the deployment Engine" in caplog.text
    front.is_serving = False
    with pytest.raises(ValueError, match="deployment Engine"):
        await reconfigure(front, {"policy": "vllm"}, rank=0)
