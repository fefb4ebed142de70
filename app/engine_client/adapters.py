"""LoRA adapters of an engine: each is served under its own model name, and can be loaded live."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from actors.engine.config import EngineConfig
from actors.scheduling.interfaces import Quote, QuoteRequest
from app.engine_client.channel import QuestionFailed
from app.engine_client.client import (
    EngineClient,
    EngineUnavailable,
    GenerationRequest,
    ModelCard,
    RequestRefused,
    TokenChunk,
    TokenSink,
)
from app.engine_client.live import LiveEngine

LOAD_WITHIN_S = 600.0  # also behind others; the stages have a shorter limit for each


class AdaptedEngine(EngineClient):
    """The engine client that serves one adapter."""

    def __init__(self, engine: EngineClient, name: str, slot: int) -> None:
        self._engine = engine
        self._name = name
        self.slot = slot
        # Random, so that no other request's salt matches this adapter's cached prefixes.
        self._salt = secrets.token_hex(16)
        self.num_open = 0
        self.is_unloaded = False

    @property
    def card(self) -> ModelCard:
        base = self._engine.card
        return replace(base, name=self._name, parent=base.name)

    async def generate(
        self, request: GenerationRequest, sink: TokenSink | None = None
    ) -> AsyncGenerator[TokenChunk, None]:
        if self.is_unloaded:
            raise RequestRefused(f"adapter {self._name!r} has been unloaded", param="model")
        salt = request.tenant if request.cache_salt is None else request.cache_salt
        asked = replace(request, adapter=self.slot + 1, cache_salt=f"{self._salt}/{salt}")
        self.num_open += 1
        try:
            async with aclosing(self._engine.generate(asked, sink)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            self.num_open -= 1

    def foreseen(self, request: GenerationRequest) -> RequestRefused | None:
        return self._engine.foreseen(request)

    def finish_early(self, request_id: str, index: int) -> None:
        self._engine.finish_early(request_id, index)

    def is_ready(self) -> bool:
        return self._engine.is_ready()

    async def status(self) -> Mapping[str, Any]:
        return await self._engine.status()

    async def quote(self, asked: QuoteRequest) -> Quote:
        return await self._engine.quote(asked)

    def subscribe_iterations(self) -> AsyncGenerator[list[Mapping[str, Any]], None]:
        return self._engine.subscribe_iterations()

    async def reconfigure(self, changes: Mapping[str, Any]) -> None:
        await self._engine.reconfigure(changes)

    async def reset_prefix_cache(self) -> None:
        await self._engine.reset_prefix_cache()


class AdapterEngine(LiveEngine):
    """Implements `client.AdapterControl` as well. names: of the adapters in `config`, in the order
    of their slots."""

    def __init__(self, config: EngineConfig, name: str, names: tuple[str, ...]) -> None:
        super().__init__(config, name)
        self.adapters: dict[str, EngineClient] = {}
        self._slots: list[AdaptedEngine | None] = [None] * config.stage.max_adapters
        self._loading: set[str] = set()
        for slot, adapter in enumerate(names):
            self._enter(adapter, slot)

    def _enter(self, name: str, slot: int) -> None:
        self.adapters[name] = self._slots[slot] = AdaptedEngine(self, name, slot)

    def _free_slots(self) -> list[int]:
        """Free slots. An unloaded adapter keeps its slot while requests run on it."""
        return [
            slot
            for slot, held in enumerate(self._slots)
            if held is None or (held.is_unloaded and not held.num_open)
        ]

    async def load_adapter(self, name: str, path: str) -> None:
        if name in self.adapters or name in self._loading or name == self.card.name:
            raise RequestRefused(f"a model {name!r} is served already", param="lora_name")
        free = self._free_slots()
        if not free:
            raise RequestRefused(
                f"all {len(self._slots)} adapter slots are taken (setting adapters.max_adapters): "
                "unload one",
                param="lora_name",
            )
        slot = free[0]
        held = self._slots[slot] = AdaptedEngine(self, name, slot)
        self._loading.add(name)
        try:
            problem = await self._load(slot, path)
            if problem is not None:
                raise RequestRefused(problem, param="lora_path")
            others = [entry for entry in self._config.adapters if entry[0] != slot]
            self._config = replace(self._config, adapters=(*others, (slot, path)))
            self.adapters[name] = held
        finally:
            self._loading.discard(name)
            if self.adapters.get(name) is not held:
                self._slots[slot] = None

    async def _load(self, slot: int, path: str) -> str | None:
        """The stages' error message or None; once more where the engine is lost meanwhile."""
        for may_repeat in (True, False):
            await self._until_ready()
            try:
                problem: str | None = await self._link.ask(
                    "load_adapter", slot, path, within_s=LOAD_WITHIN_S
                )
                break
            except (QuestionFailed, EngineUnavailable) as error:
                if self.is_ready() or not may_repeat:
                    raise EngineUnavailable(f"the adapter was not loaded: {error}") from error
        return problem

    async def unload_adapter(self, name: str) -> int:
        held = self.adapters.pop(name, None)
        if not isinstance(held, AdaptedEngine):
            raise RequestRefused(f"no adapter {name!r} is loaded", param="lora_name")
        held.is_unloaded = True
        return held.num_open
