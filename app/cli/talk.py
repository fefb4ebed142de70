"""`legato generate` and `legato chat`: talk to a running server from the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

import httpx
import typer

from app.bench.load.client import server_root
from app.terminal import console, fail

DEFAULT_URL = "http://127.0.0.1:8000"
START_ONE = "start one with: legato serve"

Url = Annotated[
    str, typer.Option(envvar="LEGATO_URL", help="The server, with or without /v1 at the end.")
]
Key = Annotated[
    str | None,
    typer.Option(envvar="LEGATO_API_KEY", help="API key, where the server asks for one."),
]
Temperature = Annotated[
    float, typer.Option(min=0.0, max=2.0, help="0 takes the likeliest token each time.")
]
MaxTokens = Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")]
Seed = Annotated[int | None, typer.Option(help="The same seed draws the same tokens.")]


class ChatClient:
    """One server and its first model; every failure ends the command with a message."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url = server_root(url)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        try:
            self._client = httpx.Client(base_url=self.url, headers=headers, timeout=None)
            answer = self._client.get("/v1/models", timeout=10.0)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            fail(f"no server answers at {self.url} ({error})", START_ONE)
        if answer.status_code != 200:
            fail(f"{self.url}/v1/models: {_message(answer)}")
        try:
            self.model = str(answer.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            fail(f"{self.url} is not an OpenAI-compatible server: it lists no model")

    def stream(self, route: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer."""
        body = {"model": self.model, "stream": True, **body}
        try:
            with self._client.stream("POST", route, json=body) as answer:
                if answer.status_code != 200:
                    answer.read()
                    fail(_message(answer))
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


def _message(answer: httpx.Response) -> str:
    """The message of a refusal."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"status {answer.status_code} {answer.reason_phrase}"


def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text to continue.")],
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.7,
    seed: Seed = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the finished answer as JSON, with its usage.")
    ] = False,
) -> None:
    """Continue a text with a running server's model, token by token."""
    talk = ChatClient(url, api_key)
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
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
) -> None:
    """Chat with a running server's model; an empty line or Ctrl-D ends."""
    talk = ChatClient(url, api_key)
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
        body = {"messages": messages, "max_tokens": max_tokens, "temperature": temperature}
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
