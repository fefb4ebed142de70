"""`legato generate` and `legato chat`: talk to a running server from the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, NoReturn

import httpx
import typer

from app.bench.load.client import server_root
from app.terminal import WRONG_USAGE, console, fail

DEFAULT_URL = "http://127.0.0.1:8000"
START_ONE = "start one with: legato serve"

Url = Annotated[
    str, typer.Option(envvar="LEGATO_URL", help="The server, with or without /v1 at the end.")
]
Key = Annotated[
    str | None,
    typer.Option(envvar="LEGATO_API_KEY", help="API key, where the server asks for one."),
]
Model = Annotated[
    str | None, typer.Option(help="Which of several models; the server's first if absent.")
]
Temperature = Annotated[
    float, typer.Option(min=0.0, max=2.0, help="0 takes the likeliest token each time.")
]
MaxTokens = Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")]
Seed = Annotated[int | None, typer.Option(help="The same seed draws the same tokens.")]


class ChatClient:
    """One server and a model of it, the first if none is named; every failure ends the command
    with a message."""

    def __init__(self, url: str, key: str | None, model: str | None = None) -> None:
        self.url = server_root(url)
        try:
            self._client = httpx.Client(base_url=self.url, headers=bearer(key), timeout=None)
            answer = self._client.get("/v1/models", timeout=10.0)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            unreachable(self.url, error)
        if answer.status_code != 200:
            fail(f"{self.url}/v1/models: {message_of(answer)}")
        try:
            served = [str(listed["id"]) for listed in answer.json()["data"]]
            self.model = served[0] if model is None else model
        except (ValueError, LookupError, TypeError):
            fail(f"{self.url} is not an OpenAI-compatible server: it lists no model")
        if self.model not in served:
            fail(f"{self.url} has no model {model!r}, but: {', '.join(served)}")

    def stream(self, route: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer."""
        body = {"model": self.model, "stream": True, **body}
        try:
            with self._client.stream("POST", route, json=body) as answer:
                if answer.status_code != 200:
                    answer.read()
                    fail(message_of(answer))
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line.removeprefix("data: "))
                        if "error" in event:
                            typer.echo("")
                            fail(event["error"]["message"])
                        yield event
        except httpx.HTTPError as error:
            typer.echo("")
            fail(f"the connection to {self.url} broke ({error})")
        except UnicodeEncodeError:  # Python keeps such bytes of arguments and input as surrogates
            fail("the text is not valid UTF-8", code=WRONG_USAGE)


def bearer(key: str | None) -> dict[bytes, bytes]:
    """The header with an API key, in UTF-8, in which servers read keys of their settings."""
    return {b"authorization": f"Bearer {key}".encode(errors="surrogateescape")} if key else {}


def message_of(answer: httpx.Response) -> str:
    """The message of a refusal."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"status {answer.status_code} {answer.reason_phrase}"


def unreachable(url: str, error: Exception) -> NoReturn:
    """Say what is wrong where no answer came, and how to start a server only where there is
    none."""
    if isinstance(error, httpx.UnsupportedProtocol | httpx.InvalidURL):
        fail(f"--url {url}: not an address such as {DEFAULT_URL}", code=WRONG_USAGE)
    if "[SSL" in str(error):
        fail(f"no HTTPS at {url} ({error})", f"--url {url.replace('https:', 'http:', 1)}?")
    if isinstance(error, httpx.ProtocolError):
        fail(f"what answers at {url} is no HTTP server ({error})")
    if isinstance(error, httpx.TimeoutException):
        fail(f"no answer from {url} in time ({type(error).__name__})")
    is_here = httpx.URL(url).host in ("127.0.0.1", "localhost", "::1", "0.0.0.0")
    fail(f"no server answers at {url} ({error})", START_ONE if is_here else None)


def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text to continue.")],
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    model: Model = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.7,
    seed: Seed = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the finished answer as JSON, with its usage.")
    ] = False,
) -> None:
    """Continue a text with a running server's model, token by token."""
    talk = ChatClient(url, api_key, model)
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "stream_options": {"include_usage": True},
    }
    if seed is not None:
        body["seed"] = seed
    text, reason, usage = "", None, None
    for event in talk.stream("/v1/completions", body):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            text += choice["text"]
            reason = choice["finish_reason"] or reason
            if not as_json:
                typer.echo(choice["text"], nl=False)
    typer.echo(
        json.dumps({"text": text, "finish_reason": reason, "usage": usage}) if as_json else ""
    )


def chat(
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    model: Model = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Most tokens of an answer; what the context leaves if absent."),
    ] = None,
    temperature: Temperature = 0.7,
) -> None:
    """Chat with a running server's model; an empty line or Ctrl-D ends."""
    talk = ChatClient(url, api_key, model)
    console.print(f"{talk.model} at {talk.url}; an empty line ends", style="dim", markup=False)
    messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    while True:
        try:
            line = input("you> ").strip()
        except (EOFError, KeyboardInterrupt):
            typer.echo("")
            break
        if not line:
            break
        messages.append({"role": "user", "content": line})
        answer = ""
        body: dict[str, Any] = {"messages": messages, "temperature": temperature}
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        try:
            for event in talk.stream("/v1/chat/completions", body):
                for choice in event["choices"]:
                    piece = choice["delta"].get("content") or ""
                    answer += piece
                    typer.echo(piece, nl=False)
        except KeyboardInterrupt:  # ends this answer, not the chat
            pass
        typer.echo("")
        messages.append({"role": "assistant", "content": answer})


def register(app: typer.Typer) -> None:
    app.command("generate")(generate)
    app.command("chat")(chat)
