"""Which parts serve a request, by the name of a model or of an adapter."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from app.api.context import Context, tokenized
from app.api.endpoints.conversation import prompt_of
from app.api.http.errors import ApiError
from app.api.http.options import ApiOptions
from app.engine_client.client import EngineClient, ModelCard
from app.text.processor import TextProcessor
from tests.app.api.hand_engine import HandEngine


@dataclass
class Adapters:
    """Those of one model, none of which comes or goes."""

    adapters: dict[str, EngineClient] = field(default_factory=dict)

    async def load_adapter(self, name: str, path: str) -> None:
        raise AssertionError

    async def unload_adapter(self, name: str) -> int:
        raise AssertionError


def made(text: TextProcessor, **names: tuple[str, ...]) -> dict[str, Context]:
    """A context by model. names: of its adapters; none: without slots."""

    def engine(name: str, parent: str | None = None) -> HandEngine:
        return HandEngine(ModelCard(name, text.model_path, 100, 300, (), 0, parent=parent))

    contexts = {}
    for model, adapters in names.items():
        slots = {name: engine(name, model) for name in adapters}
        control = Adapters({**slots}) if adapters else None
        contexts[model] = Context(engine(model), text, ApiOptions(), adapters=control)
    return contexts


def test_a_name_leads_to_the_parts_of_its_model(text: TextProcessor) -> None:
    contexts = made(text, a=("x",), b=(), c=("y", "z"))
    for context in contexts.values():
        context.models = contexts
    first = contexts["a"]
    for base, names in {"a": ("a", "x"), "b": ("b",), "c": ("c", "y", "z")}.items():
        for name in names:
            found = first.of(name)
            assert found.engine.card.name == name
            assert found.engine.card.parent == (None if name == base else base)
            assert found.events is contexts[base].events
            assert found.adapters is contexts[base].adapters
    assert first.of(None) is first
    with pytest.raises(ApiError, match="'v' does not exist here"):
        first.of("v")


async def test_many_short_prompts_leave_the_event_loop_free(text: TextProcessor) -> None:
    (context,) = made(text, a=()).values()
    ran: list[bool] = []
    asyncio.get_running_loop().call_soon(ran.append, True)
    tokens = await tokenized(["ab" * 40] * 256, context, "prompt")
    assert ran
    assert tokens == [[*b"ab" * 40]] * 256
    mixed: list[str | list[int]] = ["a", [98], "c"]
    assert await tokenized(mixed, context, "prompt") == [[97], [98], [99]]
    with pytest.raises(ApiError, match="is empty"):
        await tokenized(["a", ""], context, "prompt")


async def test_a_chat_that_is_too_long_in_any_case_is_not_rendered(text: TextProcessor) -> None:
    """Which this template would refuse."""
    refusing = TextProcessor(text.model_path, chat_template="{{ raise_exception('Rendered') }}")
    (context,) = made(refusing, a=()).values()
    for length, said in ((10, "Rendered"), (1 << 20, "The prompt is too long")):
        messages = [{"role": "user", "content": "x" * length}, {"role": "user", "content": ""}]
        with pytest.raises(ApiError, match=said):
            await prompt_of(context, messages, tools=None)
    refusing.close()


def test_a_model_alone_has_adapters_too(text: TextProcessor) -> None:
    (context,) = made(text, a=("x",)).values()
    assert context.of("a") is context
    assert context.of("x").engine.card.parent == "a"
    with pytest.raises(ApiError, match="'b' does not exist here"):
        context.of("b")
