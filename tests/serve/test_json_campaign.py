"""Constrained chats of the demo model at temperature 1.0, streamed: every answer is valid."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from jsonschema import Draft202012Validator

from tests import campaign
from tests.serve.live_server import LiveServer

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

# Strings and lists have ends, as a schema for a model that knows no JSON must: nothing else keeps
# it from filling one string until max_tokens.
WORD = {"type": "string", "maxLength": 24}
SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {"name": WORD, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {
            "tags": {"type": "array", "items": WORD, "minItems": 1, "maxItems": 4},
            "kind": {"enum": ["story", "poem", None]},
            "place": {"$ref": "#/$defs/place"},
        },
        "required": ["tags", "kind", "place"],
        "additionalProperties": False,
        "$defs": {
            "place": {
                "type": "object",
                "properties": {"city": WORD, "known": {"type": "boolean"}},
                "required": ["city"],
                "additionalProperties": False,
            }
        },
    },
    {"type": "array", "items": {"anyOf": [{"type": "boolean"}, WORD]}, "maxItems": 5},
    {
        "type": "object",
        "properties": {"code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}},
        "required": ["code"],
        "additionalProperties": False,
    },
]
ASKED = (
    "Turn this into JSON with name, age and city: Priya is 31 years old and lives in Oslo.",
    "Tell me a story about a kite.",
    "What is a stall?",
)


async def test_every_answer_is_valid(demo: LiveServer) -> None:
    async with openai.AsyncOpenAI(base_url=f"{demo.url}/v1", api_key="none") as client:
        places = asyncio.Semaphore(16)

        async def run(number: int) -> None:
            schema = SCHEMAS[number % len(SCHEMAS)]
            async with places:
                stream = await client.chat.completions.create(
                    model=demo.model,
                    messages=[{"role": "user", "content": ASKED[number % len(ASKED)]}],
                    temperature=1.0,
                    seed=number,
                    max_tokens=400,
                    stream=True,
                    logprobs=number % 2 == 0,  # composes with what is reported beside the text
                    response_format={
                        "type": "json_schema",
                        "json_schema": {"name": "answer", "schema": schema, "strict": True},
                    },
                )
                text, reason = "", None
                async for chunk in stream:
                    text += chunk.choices[0].delta.content or ""
                    reason = chunk.choices[0].finish_reason or reason
            assert reason == "stop", text
            Draft202012Validator(schema).validate(json.loads(text))

        async with asyncio.TaskGroup() as group:
            for number in range(campaign.size(20, 200)):
                group.create_task(run(number))
