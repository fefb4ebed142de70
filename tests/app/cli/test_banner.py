"""What the banner says; the whole of it is read in tests of `legato serve`."""

from __future__ import annotations

import os
import sys

import httpx
import pytest

from app.cli import banner
from app.cli.banner import ready_in
from app.settings.models import parse_each


def test_the_parts_are_the_time_from_one_end_to_the_next() -> None:
    said = ready_in([3.0, 6.2, 13.1, 28.9])
    assert said == "ready in 28.9 s: imports 3.0, Ray 3.2, Serve 6.9, model 15.8"


def test_the_capacity_of_each_model_is_asked_for_with_a_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append((request.url.params["model"], dict(request.headers.raw)[b"authorization"]))
        qps = 5.0 * len(asked)
        return httpx.Response(
            200,
            json={
                "outlook": {"tbt_s": 0.1, "num_tokens": 64, "chat_qps": qps},
                "max_model_len": 4096 // len(asked),
            },
        )

    client, transport = httpx.Client, httpx.MockTransport(answer)
    monkeypatch.setattr(httpx, "Client", lambda **given: client(**given, transport=transport))
    monkeypatch.setenv("A_KEY", "secrét")
    models = [{"model": {"path": "configs/models/demo", "name": name}} for name in ("a", "b")]
    models[0]["adapters"] = {"max_adapters": 1, "paths": {"c": "folder"}}
    args = {"models": models, "api": {"api_keys": {"env:A_KEY": {}}}}
    banner.show_banner(args, "http://127.0.0.1:1", [1.0, 2.0, 3.0, 4.0])
    assert asked == [(name, "Bearer secrét".encode()) for name in ("a", "b")]
    shown = capsys.readouterr().out
    assert "serves a, c, b at" in shown
    told = " ".join(shown.split())
    assert "of a: 100 ms between tokens: 64 tokens an iteration, about 5 requests/s" in told
    assert "of b: 100 ms between tokens: 64 tokens an iteration, about 10 requests/s" in told
    capacity = shown[shown.index("  capacity") : shown.index("  try ")]
    assert max(map(len, capacity.splitlines())) <= 80
    assert "secrét" not in shown
    assert '-H "Authorization: Bearer $LEGATO_API_KEY"' in shown, (
        "the curl works where it is pasted"
    )
    # Of b the KV cache holds less than its context.
    assert "context of b: 2048 tokens, not the model's 4096: the KV cache holds no more" in told
    assert "context of a" not in told


@pytest.mark.parametrize(("longest", "chats"), [(639, False), (640, True)])
def test_no_chats_are_counted_that_the_context_does_not_hold(longest: int, chats: bool) -> None:
    (settings,) = parse_each({"model": {"path": "none"}, "slo": {"tbt_ms": 100}})
    outlook = {"tbt_s": 0.1, "num_tokens": 64, "chat_qps": 5.0}
    said = banner._capacity({"outlook": outlook, "max_model_len": longest}, settings)
    assert said is not None
    assert said.startswith("100 ms between tokens: 64 tokens an iteration")
    assert ("of chat (512 tokens in, 128 out)" in said) == chats
    assert said.endswith("iteration") != chats


def test_a_server_goes_on_where_nobody_reads_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    args = {"model": {"path": "configs/models/demo"}}
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        banner.show_banner(args, "http://127.0.0.1:1", [1.0, 2.0, 3.0, 4.0])
        stdout.flush()  # as Python does at the end
