"""What `legato generate` and `legato chat` say of servers and models that are not there."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import typer
from typer.testing import CliRunner

from app.cli.main import app
from app.cli.talk import ChatClient, bearer, unreachable

runner = CliRunner()


@pytest.fixture
def two_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that answers with the name of the model that is asked for."""

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "first"}, {"id": "second"}]})
        choice = {"text": json.loads(request.content)["model"], "finish_reason": "stop"}
        return httpx.Response(200, text=f"data: {json.dumps({'choices': [choice]})}\n\n")

    made: Callable[..., httpx.Client] = httpx.Client

    def client(**options: Any) -> httpx.Client:
        return made(transport=httpx.MockTransport(answer), **options)

    monkeypatch.setattr(httpx, "Client", client)


@pytest.mark.parametrize(("chosen", "used"), [([], "first"), (["--model", "second"], "second")])
def test_one_of_several_models_is_asked(two_models: None, chosen: list[str], used: str) -> None:
    assert runner.invoke(app, ["generate", "x", *chosen]).stdout == f"{used}\n"
    assert ChatClient("http://h", None, used).model == used


@pytest.mark.parametrize(("chosen", "sent"), [([], None), (["--max-tokens", "7"], 7)])
def test_an_answer_may_take_what_the_context_leaves(
    monkeypatch: pytest.MonkeyPatch, chosen: list[str], sent: int | None
) -> None:
    bodies: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "first"}]})
        bodies.append(json.loads(request.content))
        return httpx.Response(200, text='data: {"choices": [{"delta": {"content": "Yes"}}]}\n\n')

    made: Callable[..., httpx.Client] = httpx.Client
    monkeypatch.setattr(
        httpx, "Client", lambda **options: made(transport=httpx.MockTransport(answer), **options)
    )
    assert "Yes" in runner.invoke(app, ["chat", *chosen], input="Is it?\n\n").stdout
    assert [body.get("max_tokens") for body in bodies] == [sent]


Serve = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Begins a server that gives these answers, one after the other; returns what it is sent."""
    made: Callable[..., httpx.Client] = httpx.Client

    def begin(*answers: httpx.Response) -> list[dict[str, Any]]:
        left, bodies = list(answers), list[dict[str, Any]]()

        def answer(request: httpx.Request) -> httpx.Response:
            if request.url.path == "/v1/models":
                return httpx.Response(200, json={"data": [{"id": "first"}]})
            bodies.append(json.loads(request.content))
            return left.pop(0)

        transport = httpx.MockTransport(answer)
        monkeypatch.setattr(httpx, "Client", lambda **options: made(transport=transport, **options))
        return bodies

    return begin


def stream(text: str, end: str = "data: [DONE]\n\n") -> httpx.Response:
    """A part of an answer of either route, and what follows."""
    choice = {"text": text, "delta": {"content": text}, "finish_reason": None}
    return httpx.Response(200, text=f"data: {json.dumps({'choices': [choice]})}\n\n{end}")


@pytest.mark.parametrize("end", ["", 'data: {"choi'])
@pytest.mark.parametrize(
    ("options", "printed"),
    [([], "So\n"), (["--json"], '{"text": "So", "finish_reason": null, "usage": null}\n')],
)
def test_an_answer_that_ends_early_is_no_success(
    serve: Serve, end: str, options: list[str], printed: str
) -> None:
    serve(stream("So", end))
    result = runner.invoke(app, ["generate", "x", *options])
    assert (result.exit_code, result.stdout) == (1, printed)
    assert "ended early, without a finish reason" in result.stderr


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_an_error_in_the_midst_follows_what_came(serve: Serve, options: list[str]) -> None:
    serve(stream("So", 'data: {"error": {"message": "lost"}}\n\n'))
    result = runner.invoke(app, ["generate", "x", *options])
    assert (result.exit_code, result.stderr) == (1, "error: lost\n")
    assert "So" in result.stdout


@pytest.mark.parametrize(
    "failure",
    [httpx.Response(status, json={"error": {"message": "no room"}}) for status in (400, 429, 503)]
    + [stream("I", 'data: {"error": {"message": "no room"}}\n\n')],
)
@pytest.mark.parametrize(("is_terminal", "status"), [(True, 0), (False, 1)])
def test_a_chat_goes_on_after_an_error(
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    failure: httpx.Response,
    is_terminal: bool,
    status: int,
) -> None:
    bodies = serve(stream("Yes"), failure, stream("Well"))
    monkeypatch.setattr("app.cli.talk._is_at_terminal", lambda: is_terminal)
    result = runner.invoke(app, ["chat"], input="One?\nTwo?\nThree?\n\n")
    assert "error: no room" in result.stderr
    assert "Well" in result.stdout
    assert [one["content"] for one in bodies[-1]["messages"]] == ["One?", "Yes", "Three?"]
    assert result.exit_code == status


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_model_s_reasoning_is_shown_dimmed_and_not_sent_again(serve: Serve, is_cut: bool) -> None:
    """A question stays in the conversation where the answer was cut within the reasoning."""
    pieces = [{"reasoning_content": "Let me "}, {"reasoning_content": "see."}]
    pieces += [] if is_cut else [{"content": "Four"}, {"content": "."}]
    choices = [{"choices": [{"delta": piece, "finish_reason": None}]} for piece in pieces]
    events = "".join(f"data: {json.dumps(choice)}\n\n" for choice in choices)
    bodies = serve(httpx.Response(200, text=f"{events}data: [DONE]\n\n"), stream("Ten."))
    result = runner.invoke(app, ["chat"], input="2 + 2?\n5 + 5?\n\n", color=True)
    # No terminal: what is written to a file is the answer alone.
    assert "\x1b[2mLet me \x1b[0m\x1b[2msee.\x1b[0m" in result.stderr
    assert "see." not in result.stdout
    assert ("Four.\n" in result.stdout) is not is_cut
    said = [one["content"] for one in bodies[-1]["messages"]]
    assert said == ["2 + 2?", "" if is_cut else "Four.", "5 + 5?"]


@pytest.mark.parametrize("command", [["generate", "x"], ["chat"]])
def test_an_output_shows_what_it_has_letters_for(serve: Serve, command: list[str]) -> None:
    serve(stream("né 漢"))
    result = CliRunner(charset="latin-1").invoke(app, command, input="a\n\n")
    assert result.exit_code == 0
    assert "né ?\n" in result.stdout


def test_a_chat_refuses_bytes_that_are_no_text(serve: Serve) -> None:
    serve()
    result = runner.invoke(app, ["chat"], input=b"\xff\n")
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (
        2,
        "error: the input is not valid UTF-8",
    )


def test_a_text_that_is_not_utf_8_is_refused(two_models: None) -> None:
    result = runner.invoke(app, ["generate", "\udcff"])  # as Python passes the byte ff
    assert (result.exit_code, result.stderr) == (2, "error: the text is not valid UTF-8\n")


def test_a_key_is_sent_as_servers_read_it() -> None:
    for key, sent in (("é", b"\xc3\xa9"), ("\udcff", b"\xff")):  # the latter is the byte ff
        assert httpx.Headers(bearer(key)).raw == [(b"authorization", b"Bearer " + sent)]


@pytest.mark.parametrize("command", [["generate", "x"], ["chat"]])
def test_a_model_that_is_not_served_is_refused(two_models: None, command: list[str]) -> None:
    result = runner.invoke(app, [*command, "--model", "third"])
    assert result.exit_code == 1
    assert "has no model 'third', but: first, second" in result.output


@pytest.mark.parametrize(
    ("url", "error", "said", "starts_one"),
    [
        ("http://127.0.0.1:1", httpx.ConnectError("refused"), "no server answers at", True),
        ("http://elsewhere:1", httpx.ConnectError("unknown"), "no server answers at", False),
        ("https://127.0.0.1:1", httpx.ConnectError("[SSL: WRONG] x"), "no HTTPS at", False),
        ("foo", httpx.UnsupportedProtocol("no http://"), "--url foo: not an address", False),
        ("http://[x", httpx.InvalidURL("Invalid port"), "--url http://[x: not an address", False),
        ("http://h:1", httpx.RemoteProtocolError("bad"), "is no HTTP server", False),
        ("http://h:1", httpx.ReadTimeout("late"), "no answer from", False),
    ],
)
def test_a_server_is_to_be_started_only_where_there_is_none(
    url: str, error: Exception, said: str, starts_one: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit):
        unreachable(url, error)
    printed = capsys.readouterr().err
    assert said in printed
    assert ("start one with" in printed) is starts_one
