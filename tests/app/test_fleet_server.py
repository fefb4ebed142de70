"""What Serve asks of the replicas of a fleet."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.fleet.snapshot import EngineState
from app.fleet_server import Front, served_by, stats_of
from app.settings.load import parse, resolve
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


def test_fronts_and_engines_belong_together_by_name_and_tokenizer(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    first, second = (str(tmp_path / name / "llama") for name in "ab")
    for folder in (first, second):
        shutil.copytree(tiny_model("llama"), folder)

    def serves(path: str, name: str | None = None, **sections: dict[str, Any]) -> str:
        settings = parse({"model": {"path": path, "name": name}, "fleet": {}, **sections})
        return served_by(settings, resolve(settings))

    before = serves(first)
    assert serves(first, kv={"memory_gib": 0.1}, adapters={"max_adapters": 2}) == before
    assert serves(first, speculation={"drafter": "none"}, slo={"tbt_ms": 100}) == before
    Path(second, "tokenizer.model").write_text("a node may lack what no process reads")
    config = Path(second, "config.json")
    config.write_text(config.read_text() + "\n")
    assert serves(second) == before
    assert serves(first, "renamed") != before
    Path(first, "tokenizer.json").write_text("{}")
    assert serves(first) != before
    Path(second, "tokenizer.json").unlink()
    assert serves(second) not in (before, serves(first))
