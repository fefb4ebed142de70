"""`legato generate` and `legato chat`: talk to a running server from the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

_err = Console(stderr=True, highlight=False)

Url = Annotated[str, typer.Option(envvar="LEGATO_URL", help="Root of the server.")]
Key = Annotated[str | None, typer.Option(envvar="LEGATO_API_KEY", help="API key, if it asks.")]
Temperature = Annotated[float, typer.Option(min=0.0, max=2.0)]
MaxTokens = Annotated[int, typer.Option(min=1)]
DEFAULT_URL = "http://127.0.0.1:8000"


class Talk:
    """One server and model; raises typer.Exit with a plain message when it cannot be reached."""

    def __init__(self, url: str, key: str | None) -> None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(base_url=url.rstrip("/"), headers=headers, timeout=None)
        try:
            answer = self._client.get("/v1/models")
            answer.raise_for_status()
            self.model = str(answer.json()["data"][0]["id"])
        except httpx.HTTPError as error:
            _err.print(f"[red]error:[/] no server answers at {url} ({error})")
            _err.print("start one with: legato serve")
            raise typer.Exit(1) from None

    def stream(self, route: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer."""
        body = {"model": self.model, "stream": True, **body}
        with self._client.stream("POST", route, json=body) as answer:
            if answer.status_code != 200:
                message = json.loads(answer.read())["error"]["message"]
                _err.print(f"[red]error:[/] {message}")
                raise typer.Exit(1)
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        _err.print(f"\n[red]error:[/] {event['error']['message']}")
                        raise typer.Exit(1)
                    yield event


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.7,
    seed: int | None = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole answer.")] = False,
) -> None:
    """Continue a prompt, streaming."""
    talk = Talk(url, api_key)
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
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
) -> None:
    """Chat in the terminal; an empty line or Ctrl-D ends."""
    talk = Talk(url, api_key)
    _err.print(f"[dim]{talk.model} at {url}; an empty line ends[/]")
    messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    while True:
        try:
            line = input("you> ").strip()
        except (EOFError, KeyboardInterrupt):
            break
        if not line:
            break
        messages.append({"role": "user", "content": line})
        answer = ""
        body = {"messages": messages, "max_tokens": max_tokens, "temperature": temperature}
        for event in talk.stream("/v1/chat/completions", body):
            for choice in event["choices"]:
                piece = choice["delta"].get("content") or ""
                answer += piece
                typer.echo(piece, nl=False)
        typer.echo("")
        messages.append({"role": "assistant", "content": answer})


def register(app: typer.Typer) -> None:
    app.command("generate")(generate)
    app.command("chat")(chat)
