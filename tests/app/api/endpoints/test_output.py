"""Answers in a format, as families write them."""

from __future__ import annotations

from actors.stage.grammars.guidance import GuidanceCompiler
from tests.app.api.conftest import MODEL, StartServer
from tests.app.api.test_reasoning_http import HELLO, OfFamily, of_family, write

__all__ = ["of_family"]
BEGIN, END = "<|START_RESPONSE|>", "<|END_RESPONSE|>"


async def test_command_r7b_may_write_its_marks_around_an_answer(
    start_server: StartServer, of_family: OfFamily
) -> None:
    processor = of_family("command_r7b")
    server = await start_server(processor=processor)
    write(server, processor, f"<|START_THINKING|>Hm.<|END_THINKING|>{BEGIN}{{}}{END}")
    body = {"model": MODEL, "messages": HELLO, "response_format": {"type": "json_object"}}
    answer = await server.http.post("/v1/chat/completions", json=body)
    message = answer.json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "{}")
    grammar = server.engine.seen[-1].sampling.grammar
    assert grammar is not None
    texts = [*(bytes([byte]) for byte in range(256)), b""]
    make = GuidanceCompiler(texts, (256,)).compile(grammar.kind, grammar.text, grammar.frame)
    for text, is_taken in (
        ("{}", True),
        (f"{BEGIN}{{}}", True),
        (f"{BEGIN}{{}}{END}", True),
        (f"{{}}{END}", False),
        (f"{BEGIN}{END}", False),
        (f"{BEGIN}{{}}{END}{END}", False),
    ):
        matcher = make()
        taken = all(map(matcher.take, text.encode())) and (matcher.is_over or matcher.take(256))
        assert taken is is_taken, text
