"""`legato generate` and `legato chat`: talk to a running server from the terminal."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from typing import Annotated, Any, NoReturn

import httpx
import typer

from app.bench.load.client import server_root
from app.terminal import FAILED, WRONG_USAGE, console, fail, print_error

DEFAULT_URL = "http://127.0.0.1:8000"
START_ONE = "start one with: legato serve"
GIVE_KEY = "give it with --api-key or the environment variable LEGATO_API_KEY"

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


class AnswerError(Exception):
    """An answer was refused or broke off. code: the exit status of a command that this ends."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code


class ChatClient:
    """One server and a model of it, the first if none is named, without which the command ends."""

    def __init__(self, url: str, key: str | None, model: str | None = None) -> None:
        self.url = server_root(url)
        try:
            self._client = httpx.Client(base_url=self.url, headers=bearer(key), timeout=None)
            answer = self._client.get("/v1/models", timeout=10.0)
        except (httpx.HTTPError, httpx.InvalidURL, ImportError) as error:  # of a SOCKS proxy
            unreachable(self.url, error)
        if answer.status_code != 200:
            refused(f"{self.url}/v1/models", answer)
        try:
            served = [str(listed["id"]) for listed in answer.json()["data"]]
            self.model = served[0] if model is None else model
        except (ValueError, LookupError, TypeError):
            fail(f"{self.url} is not an OpenAI-compatible server: it lists no model")
        if self.model not in served:
            fail(f"{self.url} has no model {model!r}, but: {', '.join(served)}")

    def stream(self, route: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer. Raises AnswerError."""
        body = {"model": self.model, "stream": True, **body}
        is_whole = False
        try:
            with self._client.stream("POST", route, json=body) as answer:
                if answer.status_code != 200:
                    answer.read()
                    raise AnswerError(message_of(answer))
                for line in answer.iter_lines():
                    is_whole = is_whole or line.startswith("data: [DONE]")
                    if line.startswith("data: {"):
                        event = json.loads(line.removeprefix("data: "))
                        if "error" in event:
                            raise AnswerError(event["error"]["message"])
                        choices = event.get("choices", ())
                        is_whole = is_whole or any(one.get("finish_reason") for one in choices)
                        yield event
        except httpx.HTTPError as error:
            raise AnswerError(f"the connection to {self.url} broke ({error})") from error
        except UnicodeEncodeError as error:  # Python keeps such bytes of arguments as surrogates
            raise AnswerError("the text is not valid UTF-8", WRONG_USAGE) from error
        except json.JSONDecodeError:  # an event that was cut off
            is_whole = False
        if not is_whole:
            raise AnswerError(f"the answer of {self.url} ended early, without a finish reason")


def bearer(key: str | None) -> dict[bytes, bytes]:
    """The header with an API key, in UTF-8, in which servers read keys of their settings."""
    return {b"authorization": f"Bearer {key}".encode(errors="surrogateescape")} if key else {}


def message_of(answer: httpx.Response) -> str:
    """The message of a refusal."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"status {answer.status_code} {answer.reason_phrase}"


def refused(url: str, answer: httpx.Response) -> NoReturn:
    """Say why there is no answer; the server's own words name headers, where a key is missing."""
    fail(f"{url}: {message_of(answer)}", GIVE_KEY if answer.status_code == 401 else None)


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
    _print_any_text()
    text, reason, usage, failure = "", None, None, None
    try:
        for event in talk.stream("/v1/completions", body):
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                text += choice["text"]
                reason = choice["finish_reason"] or reason
                if not as_json:
                    typer.echo(choice["text"], nl=False)
    except AnswerError as error:
        failure = error
    if text or failure is None:
        content = {"text": text, "finish_reason": reason, "usage": usage}
        typer.echo(json.dumps(content) if as_json else "")
    if failure is not None:
        fail(failure, code=failure.code)


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
    _print_any_text()
    has_failed = False
    while True:
        try:
            line = input("you> ").strip()
        except (EOFError, KeyboardInterrupt):
            typer.echo("")
            break
        except UnicodeDecodeError:
            typer.echo("")
            fail("the input is not valid UTF-8", code=WRONG_USAGE)
        if not line:
            break
        messages.append({"role": "user", "content": line})
        answer, is_thinking = "", False
        body: dict[str, Any] = {"messages": messages, "temperature": temperature}
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        try:
            for event in talk.stream("/v1/chat/completions", body):
                for choice in event["choices"]:
                    if thought := choice["delta"].get("reasoning_content"):
                        typer.secho(thought, dim=True, nl=False, err=not sys.stdout.isatty())
                        is_thinking = True
                    piece = choice["delta"].get("content") or ""
                    if piece and is_thinking:
                        typer.echo("\n", err=not sys.stdout.isatty())
                        is_thinking = False
                    answer += piece
                    typer.echo(piece, nl=False)
        except KeyboardInterrupt:  # ends this answer, not the chat
            pass
        except AnswerError as error:  # nor does this: what was said before is kept
            if answer or is_thinking:
                typer.echo("")
            print_error(error)
            messages.pop()
            has_failed = True
            continue
        typer.echo("")
        messages.append({"role": "assistant", "content": answer})
    if has_failed and not _is_at_terminal():  # nobody has read the error
        raise typer.Exit(FAILED)


def _is_at_terminal() -> bool:
    return sys.stdin.isatty()


def _print_any_text() -> None:
    """Print what the output's encoding lacks as question marks."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def register(app: typer.Typer) -> None:
    app.command("generate")(generate)
    app.command("chat")(chat)
