"""Ranks of stages without processes: what Ray would do is done here, and the test says how.

A call waits, as an actor's does, until it is answered or its rank dies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

import actors.executor.stage_set as module
from actors.engine.config import EngineConfig
from actors.executor.stage_set import StageSet
from actors.scheduling.plan import StepPlan, StepResult
from actors.stage.spec import StageInfo, StageSpec
from actors.transport.messages import StageAnswer, StageMessage, pack, unpack
from tests.actors.scheduling.short_lives import config

HERE = "this node"
ENDLESS = object()  # an answer that never comes


def info(**changes: Any) -> StageInfo:
    fields: dict[str, Any] = {
        "hidden_size": 8,
        "vocab_size": 11,
        "max_model_len": 64,
        "dtype": "float32",
        "backend": "paper",
        "kv_block_bytes": 1 << 10,
        "available_bytes": 1 << 20,
        "eos_token_ids": (0,),
        "num_parameters": 100,
    }
    return StageInfo(**(fields | changes))


class Method:
    def __init__(self, rank: Rank, name: str) -> None:
        self._rank = rank
        self._name = name

    def remote(self, *arguments: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._rank.call(self._name, arguments))


class Rank:
    """One actor. answers: by method; an exception is raised, a list answers call after call."""

    def __init__(self, stage: int, rank: int, pid: int, is_last: bool) -> None:
        self.place = stage, rank
        self.is_last = is_last
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.dead = asyncio.Event()
        self.answers: dict[str, Any] = {
            "load": info(),
            "pid": pid,
            "node_id": "another node",
            "loading_progress": 0.5,
            "allocate": None,
            "settle": None,
            "open_tier": (),
            "watch": ENDLESS,
            "is_unused": True,
            "load_adapter": None,
            "leave_load": None,
            "compile_grammar": None,
            "free_address": f"node-{stage}:1234",
        }

    def __getattr__(self, name: str) -> Method:
        return Method(self, name)

    def called(self, name: str) -> list[tuple[Any, ...]]:
        return [arguments for called, arguments in self.calls if called == name]

    async def call(self, name: str, arguments: tuple[Any, ...]) -> Any:
        self.calls.append((name, arguments))
        answer = self.answers[name] if name != "step" else await self._step(arguments[0])
        if isinstance(answer, list):
            answer = answer.pop(0)
        if answer is ENDLESS and not self.dead.is_set():
            await self.dead.wait()
        await asyncio.sleep(0)
        if self.dead.is_set():
            raise ray.exceptions.ActorDiedError
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def _step(self, message: Any) -> StageMessage | StageAnswer:
        """Every request's token is 7."""
        if isinstance(message, asyncio.Future):  # as Ray does with a reference
            message = await message
        if not self.is_last:
            passed_on: StageMessage = message
            return passed_on
        ticket, packed, _, _, failure = message
        plan = unpack(StepPlan, packed)
        tokens = tuple((part.request_id, 7) for part in plan.named_slices if part.samples)
        return ticket, pack(StepResult(plan.step_id, tokens)), failure

    def die(self) -> None:
        self.dead.set()


class Cluster:
    """What an engine finds of Ray. sets: [stage][rank] of each time that stages were created."""

    def __init__(self, num_stages: int, num_ranks: int) -> None:
        self.sizes = num_stages, num_ranks
        self.sets: list[list[list[Rank]]] = []
        self.answers: list[dict[str, Any]] = []  # of the next sets, in place of the usual ones
        self.named: dict[str, Rank] = {}

    def create(self, *arguments: Any) -> list[list[Rank]]:
        num_stages, num_ranks = self.sizes
        number, answers = len(self.sets), self.answers.pop(0) if self.answers else {}
        made = [
            [
                Rank(stage, rank, 1000 * number + 10 * stage + rank, stage == num_stages - 1)
                for rank in range(num_ranks)
            ]
            for stage in range(num_stages)
        ]
        self.sets.append(made)
        for rank in flat(made):
            lists = {name: [*a] for name, a in answers.items() if isinstance(a, list)}
            rank.answers |= answers | lists
        return made

    def get_actor(self, name: str) -> Rank:
        if name not in self.named:
            raise ValueError(name)
        return self.named[name]


def flat(ranks: Sequence[Sequence[Rank]]) -> list[Rank]:
    return [rank for stage in ranks for rank in stage]


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while True:
            if condition():
                return
            await asyncio.sleep(0)


def died() -> Exception:
    """As a dead actor's call answers."""
    return ray.exceptions.ActorDiedError()


def raised(cause: Exception) -> Exception:
    """As an actor's method that raised it answers."""
    return ray.exceptions.RayTaskError("method", f"its traceback: {cause}", cause)


def settings(**changes: Any) -> EngineConfig:
    """Two stages of two ranks."""
    spec = StageSpec("none", num_stages=2, tensor_ranks=2)
    return replace(EngineConfig(spec, config(num_stages=2), transport="call"), **changes)


def drawn(folder: Path) -> StageSpec:
    """A model whose weights have a name, which a tier's blocks are kept by."""
    (folder / "config.json").write_text("{}")
    return replace(settings().stage, model_path=str(folder), load_format="dummy")


def stage_set(cluster: Cluster, **changes: Any) -> StageSet:
    """A replica's first set, not built yet. changes: of `settings`."""
    return StageSet(settings(**changes), cluster.create())


def in_place_of_ray(monkeypatch: pytest.MonkeyPatch, num_stages: int, num_ranks: int) -> Cluster:
    made = Cluster(num_stages, num_ranks)
    here = SimpleNamespace(get_node_id=lambda: HERE)
    monkeypatch.setattr(ray, "kill", lambda rank: rank.die())
    monkeypatch.setattr(ray, "get_actor", made.get_actor)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: here)
    monkeypatch.setattr(module, "create_stages", made.create)
    monkeypatch.setattr(module, "current_group", lambda: None)
    return made
