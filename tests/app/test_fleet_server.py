"""What Serve asks of the replicas of a fleet."""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve._private.config import DeploymentConfig
from ray.serve.context import ReplicaContext
from ray.serve.schema import ReplicaRank

from actors.fleet.snapshot import EngineState
from app.fleet_server import EngineReplica, Front, served_by, stats_of, until_succeeded
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


class Model:
    """An engine and its entry, as its replica sees them while another model replaces its own.
    num_looks: how often its fronts were counted; they leave one by one, then."""

    def __init__(self, num_fronts: int = 0, is_replaced: bool = True) -> None:
        self.num_fronts, self._is_replaced = num_fronts, is_replaced
        self.num_looks = 0
        self.ended: list[bool] = []

    async def is_replaced(self) -> bool:
        return self._is_replaced

    async def status(self) -> dict[str, int]:
        self.num_looks += 1
        found, self.num_fronts = self.num_fronts, max(0, self.num_fronts - 1)
        return {"num_fronts": found}

    async def leave(self) -> None:
        self.ended.append(self.confirming.cancelling() > 0)

    async def close(self) -> None: ...

    confirming: asyncio.Task[Any]


@pytest.mark.parametrize(
    ("num_fronts", "is_replaced", "within_s", "num_looks"),
    [
        (3, True, math.inf, 4),
        (0, True, math.inf, 1),  # at once
        (3, True, 0.0, 0),
        (3, False, math.inf, 0),  # as it is scaled down, or the server ends
    ],
)
async def test_an_engine_of_a_replaced_model_serves_as_long_as_fronts_need_it(
    monkeypatch: pytest.MonkeyPatch,
    num_fronts: int, is_replaced: bool, within_s: float, num_looks: int,
) -> None:  # fmt: skip
    monkeypatch.setattr("app.fleet_server._SUCCEEDED_PERIOD_S", 0.0)
    model: Any = Model(num_fronts, is_replaced)
    await until_succeeded(model, model, within_s)
    assert model.num_looks == num_looks


@pytest.mark.parametrize("granted_s", [0.0, 600.0])
async def test_its_entry_is_repeated_until_it_leaves(
    monkeypatch: pytest.MonkeyPatch, granted_s: float
) -> None:
    monkeypatch.setattr("app.fleet_server._SUCCEEDED_PERIOD_S", 0.0)
    config = DeploymentConfig(graceful_shutdown_timeout_s=granted_s)
    replica_id, rank = (
        ReplicaID("r", DeploymentID("Engine")),
        ReplicaRank(rank=0, node_rank=0, local_rank=0),
    )
    context = ReplicaContext(replica_id, print, config, rank, 1)
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    model: Any = Model(num_fronts=2)
    model.confirming = asyncio.create_task(asyncio.sleep(math.inf))
    replica = SimpleNamespace(engine=model, member=model, confirming=model.confirming)
    status = model.status

    async def counted() -> dict[str, int]:
        assert not model.confirming.cancelling()
        return dict(await status())

    model.status = counted
    await EngineReplica.func_or_class.__del__(replica)
    assert model.num_looks == (3 if granted_s else 0)
    assert model.ended == [True]


async def test_an_engine_that_has_not_loaded_ends_at_once() -> None:
    """Serve ends a replica whose constructor is under way, too."""
    member: Any = SimpleNamespace()
    await EngineReplica.func_or_class.__del__(SimpleNamespace(member=member))


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
