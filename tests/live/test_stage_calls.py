"""Calls of a stage actor run beside each other where one may take long: Ray decides which do."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.executor.placement import create_stages
from actors.scheduling.request import Grammar
from app.settings.load import parse, resolve

pytestmark = pytest.mark.ray


class Runner:
    """A stage's, whose loads of adapters end once a grammar has been compiled."""

    def __init__(self) -> None:
        self._compiled = threading.Event()
        self._loaded: list[int] = []

    def load_adapter(self, slot: int, folder: Path) -> None:
        self._compiled.wait()
        self._loaded.append(slot)

    def compile_grammar(self, grammar: Grammar) -> None:
        self._compiled.set()
        raise ValueError(f"{self._loaded} are loaded")


def put_runner(stage: Any) -> None:
    stage._runner = Runner()


def loaded(stage: Any) -> list[int]:
    found: list[int] = stage._runner._loaded
    return found


async def test_a_grammar_does_not_wait_for_adapters(ray_cluster: None) -> None:
    """Beside busy steps a load may take tens of seconds. Loads keep their order."""
    settings = parse({"model": {"path": "configs/models/demo"}, "parallel": {"device": "cpu"}})
    ((actor,),) = create_stages(resolve(settings), None)
    try:
        async with asyncio.timeout(60):
            await actor.__ray_call__.remote(put_runner)
            loads = [actor.load_adapter.remote(slot, "folder") for slot in range(4)]
            assert await actor.compile_grammar.remote(Grammar("regex", "a")) == "[] are loaded"
            assert await asyncio.gather(*loads) == [None] * 4
            assert await actor.__ray_call__.remote(loaded) == [0, 1, 2, 3]
    finally:
        ray.kill(actor)
