"""Efforts and switches of reasoning: the same prompt through each API, for each family."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.text.processor import TextProcessor
from tests.app.api.conftest import MODEL, Server, StartServer
from tests.app.text.families import family_folder

OfFamily = Callable[[str], TextProcessor]
THINK_NOTHING = "<think>\n\n</think>"
SOLAR = "<|begin|>assistant"


@pytest.fixture(scope="module")
def of_family(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OfFamily]:
    made: dict[str, TextProcessor] = {}

    def make(family: str) -> TextProcessor:
        if family not in made:
            folder = Path(tmp_path_factory.mktemp(family))
            made[family] = TextProcessor(family_folder(folder, family))
        return made[family]

    yield make
    for processor in made.values():
        processor.close()


async def answered(server: Server, path: str, **fields: Any) -> Any:
    body = {"model": MODEL, **fields}
    if path != "/v1/responses":
        body |= {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    else:
        body |= {"input": "Hi", "max_output_tokens": 1}
    return await server.http.post(path, json=body)


async def prompts(server: Server, processor: TextProcessor, **fields: Any) -> list[str]:
    """Of chats, responses and messages that ask for the same effort; effort: of each API's form."""
    found = []
    effort = fields.pop("effort", None)
    off = effort in ("none", "minimal")
    for path, asked in (
        ("/v1/chat/completions", {"reasoning_effort": effort}),
        ("/v1/responses", {"reasoning": {"effort": effort}}),
        (
            "/v1/messages",
            {"thinking": {"type": "disabled"}} if off else {"output_config": {"effort": effort}},
        ),
    ):
        answer = await answered(server, path, **(asked if effort else {}), **fields)
        assert answer.status_code == 200, answer.text
        tokens = server.engine.seen[-1].prompt
        found.append(processor.decode(tokens, skip_special_tokens=False))
    return found


@pytest.mark.parametrize(
    ("family", "given", "end"),
    [
        ("qwen3", {"effort": "none"}, THINK_NOTHING),
        ("qwen3", {"effort": "high"}, "assistant\n"),
        ("qwen3", {"chat_template_kwargs": {"enable_thinking": False}}, THINK_NOTHING),
        ("glm_45", {"effort": "minimal"}, "<think></think>"),
        ("deepseek_v31", {"effort": "low"}, "<think>"),
        ("deepseek_v31", {"chat_template_kwargs": {"thinking": True}}, "<think>"),
        ("deepseek_v32", {"effort": "none"}, "</think>"),
        ("gemma_4", {"effort": "none"}, "<|channel>thought\n<channel|>"),
        ("gpt_oss", {"effort": "low"}, None),
        ("gpt_oss", {"chat_template_kwargs": {"reasoning_effort": "low"}}, None),
        ("solar_open", {"effort": "high"}, SOLAR),
        ("solar_open", {"effort": "low"}, f"{SOLAR}<|think|><|end|>{SOLAR}"),
        ("solar_open", {"effort": "none"}, f"{SOLAR}<|think|><|end|>{SOLAR}"),
        (
            "solar_open",
            {"chat_template_kwargs": {"reasoning_effort": "low"}},
            f"{SOLAR}<|think|><|end|>{SOLAR}",
        ),
    ],
)
async def test_every_api_gives_the_template_the_same(
    start_server: StartServer, of_family: OfFamily, family: str, given: Any, end: str | None
) -> None:
    processor = of_family(family)
    server = await start_server(processor=processor)
    chat, response, message = await prompts(server, processor, **given)
    assert chat == response == message
    assert chat.rstrip().endswith(end.rstrip()) if end else "Reasoning: low" in chat


async def test_a_variable_goes_before_what_an_effort_says(
    start_server: StartServer, of_family: OfFamily
) -> None:
    processor = of_family("qwen3")
    server = await start_server(processor=processor)
    variables = {"enable_thinking": True}
    found = await prompts(server, processor, effort="none", chat_template_kwargs=variables)
    assert not any("</think>" in one for one in found)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_a_variable_that_the_template_does_not_read_is_refused(
    start_server: StartServer, of_family: OfFamily, path: str
) -> None:
    server = await start_server(processor=of_family("solar_open"))
    answer = await answered(server, path, chat_template_kwargs={"enable_thinking": False})
    assert answer.status_code == 400
    assert "enable_thinking" in answer.text


async def test_solar_open_reasons_again_where_it_was_switched_off(
    start_server: StartServer, of_family: OfFamily
) -> None:
    processor = of_family("solar_open")
    server = await start_server(processor=processor)
    text = f"<|think|>Hm.<|end|>{SOLAR}<|content|>Hi."
    for written, reasoning in ((text, "Hm."), ("<|content|>Hi.", None)):
        tokens = [*processor.encode_now(written), server.engine.card.eos_token_ids[0]]
        server.engine.script = lambda request, index, tokens=tokens: tokens
        messages = [{"role": "user", "content": "Hi"}]
        body = {"model": MODEL, "messages": messages, "reasoning_effort": "low"}
        answer = (await server.http.post("/v1/chat/completions", json=body)).json()
        message = answer["choices"][0]["message"]
        assert (message.get("reasoning_content"), message["content"]) == (reasoning, "Hi.")


async def test_an_effort_that_the_template_does_not_name_is_refused(
    start_server: StartServer, of_family: OfFamily
) -> None:
    server = await start_server(processor=of_family("solar_open"))
    answer = await answered(server, "/v1/chat/completions", reasoning_effort="max")
    assert answer.status_code == 400
    assert "supports the efforts minimal, low, medium, high." in answer.text
