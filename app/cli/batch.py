"""`legato batch`: answers a file of requests in the slack of live streams."""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import json
import os
import stat
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, BinaryIO, Final

import httpx
import typer
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from app.api.batches.lines import Line, LineError, parse_line
from app.api.batches.runner import QUOTE, Answer, BatchRunner, NotJsonError, Reply, SendError
from app.bench.load.client import server_root
from app.cli.talk import DEFAULT_URL, Key, Url, bearer, message_of, refused, unreachable
from app.terminal import FAILED, WRONG_USAGE, console, fail

URLS: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
)


def batch(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Requests, as OpenAI's batches.")],
    target: Annotated[
        Path, typer.Argument(metavar="OUT", help="Answers; those it holds are not asked for again.")
    ],
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Most requests at a time.")] = 32,
    give_up_after: Annotated[
        float, typer.Option(min=0.0, help="Hours after which what is left fails.")
    ] = 24.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the totals as JSON.")] = False,
) -> None:
    """Answer a file of requests while live streams keep their objectives.

    Every line of IN is one request, {"custom_id", "method": "POST", "url", "body"}. Each is sent
    with the lowest priority and only while the server's quote says that there is room for it.
    After an interruption, the same command continues where it stopped.
    """
    lines = read_lines(source)
    try:
        answered, file = keep_answers(target)
    except OSError as error:
        fail(f"{target}: {error.strerror or error}", code=WRONG_USAGE)
    left = [line for line in lines if line.custom_id not in answered]
    root = server_root(url)
    try:
        with file:
            work = _run(left, file, root, api_key, concurrency, 3600 * give_up_after)
            totals = asyncio.run(work)
    except OSError as error:  # a full disk, for instance
        fail(f"{target}: {error.strerror or error}")
    except KeyboardInterrupt:
        fail(f"interrupted; run it again to go on with what is not in {target}")
    report = {**dataclasses.asdict(totals), "num_kept": len(lines) - len(left)}
    if as_json:
        typer.echo(json.dumps(report))
    else:
        console.print(
            f"{target}: {totals.num_done} answered, {totals.num_failed} failed, "
            f"{len(lines) - len(left)} kept; {totals.num_completion_tokens} tokens in "
            f"{totals.seconds:.1f} s",
            markup=False,
        )
    if totals.num_failed:
        raise typer.Exit(FAILED)


async def _run(
    lines: list[Line],
    file: BinaryIO,
    root: str,
    api_key: str | None,
    concurrency: int,
    give_up_s: float,
) -> Totals:
    timeout = httpx.Timeout(give_up_s or None, connect=10.0)
    limits = httpx.Limits(max_connections=concurrency + 1)
    try:
        made = httpx.AsyncClient(
            base_url=root, headers=bearer(api_key), timeout=timeout, limits=limits
        )
    except ImportError as error:  # of a SOCKS proxy
        unreachable(root, error)
    async with made as client:
        try:
            answer = await client.get("/v1/models", timeout=10.0)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            unreachable(root, error)
        if answer.status_code in (401, 403):  # as every request's would be
            refused(root, answer)
        return await answer_all(client, lines, file, concurrency, give_up_s)


async def answer_all(
    client: httpx.AsyncClient,
    lines: Sequence[Line],
    file: BinaryIO,
    concurrency: int = 32,
    give_up_s: float = 86_400.0,
) -> Totals:
    """Send these requests and append their answers to the file."""
    totals = Totals()
    began_s = time.monotonic()
    progress = Waits(len(lines))

    async def write(answer: Answer) -> None:
        file.write(answer.line())
        file.flush()
        totals.add(answer)
        progress.answered(totals)

    async def each() -> AsyncGenerator[Line, None]:
        for line in lines:
            yield line

    calls = HttpCalls(client, progress)
    runner = BatchRunner(calls, write, min(concurrency, len(lines)), give_up_s)
    with progress.bar:
        async with aclosing(each()) as source:
            await runner.run(source)
    totals.seconds = time.monotonic() - began_s
    return totals


@dataclass(slots=True)
class Totals:
    """Counts of the results."""

    num_done: int = 0
    num_failed: int = 0
    num_completion_tokens: int = 0
    seconds: float = 0.0

    def add(self, answer: Answer) -> None:
        """Count one more."""
        if answer.reply is None or not answer.is_done:
            self.num_failed += 1
            return
        self.num_done += 1
        usage = json.loads(answer.reply.content).get("usage") or {}
        tokens = usage.get("completion_tokens", usage.get("output_tokens", 0))
        self.num_completion_tokens += tokens


class Waits:
    """A line on a terminal of how far the batch is, and of what it waits for."""

    def __init__(self, total: int) -> None:
        columns = (
            MofNCompleteColumn(),
            TextColumn("answered, {task.fields[failed]} failed,"),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        self.bar = Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        )
        self._task = self.bar.add_task("", total=total, failed=0)

    def answered(self, totals: Totals) -> None:
        completed = totals.num_done + totals.num_failed
        self.bar.update(self._task, completed=completed, failed=totals.num_failed)

    def asked(self, url: str, answer: httpx.Response | None) -> None:
        """answer: None if none came."""
        if answer is None or answer.status_code in (502, 504):
            self._say("the server does not answer; asking again")
        elif answer.status_code in (429, 503):
            self._say("the server is busy; asking again")
        elif url != QUOTE or answer.status_code != 200:
            self._say("")
        else:
            has_room = b'"can_serve_now":false' not in answer.content.replace(b" ", b"")
            self._say("" if has_room else "waiting for room beside live streams")

    def _say(self, text: str) -> None:
        self.bar.update(self._task, description=text)


@dataclass(frozen=True, slots=True)
class HttpCalls:
    """Implements `runner.Server` over HTTP."""

    client: httpx.AsyncClient
    waits: Waits = field(default_factory=lambda: Waits(0))

    async def post(self, url: str, body: bytes) -> Reply:
        headers = {"content-type": "application/json"}
        try:
            answer = await self.client.post(url, content=body, headers=headers)
        except httpx.HTTPError as error:
            self.waits.asked(url, None)
            raise SendError(repr(error)) from error
        self.waits.asked(url, answer)
        try:
            content = json.dumps(answer.json()).encode()  # on one line, however it was written
        except ValueError as error:
            if answer.status_code == 200:
                raise NotJsonError(repr(error)) from error
            content = json.dumps({"error": {"message": message_of(answer)}}).encode()  # a proxy's
        request_id = answer.headers.get("x-request-id", "")
        return Reply(answer.status_code, content, request_id, answer.headers.get("retry-after"))


def read_lines(source: Path) -> list[Line]:
    """Read the requests; before any is sent, ends the command if a line is wrong, naming it."""
    try:
        texts = source.read_bytes().split(b"\n")  # `splitlines` also splits at U+2028 in a text
    except OSError as error:
        fail(f"{source}: {error.strerror or error}", code=WRONG_USAGE)
    lines: list[Line] = []
    for number, text in enumerate(texts, 1):
        if text.strip():
            try:
                lines.append(parse_line(text, URLS))
            except LineError as error:
                fail(f"{source}:{number}: {error}", code=WRONG_USAGE)
    seen: set[str] = set()
    for line in lines:
        if line.custom_id in seen:
            fail(f"{source}: custom_id {line.custom_id!r} appears twice", code=WRONG_USAGE)
        seen.add(line.custom_id)
    if not lines:
        fail(f"{source} holds no request", code=WRONG_USAGE)
    return lines


def keep_answers(target: Path) -> tuple[set[str], BinaryIO]:
    """The requests already answered in the file, and the file, to be appended to by this process
    alone while it is open. Failures, and a last line that an interruption cut short, are removed.
    Ends the command, with the file as it was, if it holds anything else or another process has it.
    Raises OSError."""
    if target.exists() and not target.is_file():
        fail(f"{target} is no file", code=WRONG_USAGE)
    if target.is_symlink():
        target = Path(os.path.realpath(target))  # what is replaced is the file, not the link to it
    with _locked(target):
        kept = _answers(target)
        file = target.with_name(f".{target.name}.part").open("wb")
        os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
        fcntl.flock(file, fcntl.LOCK_EX)  # at once: it is the only one that has come here
        file.write(b"".join(text + b"\n" for text in kept.values()))
        file.flush()
        os.replace(file.name, target)
    return set(kept), file


def _locked(target: Path) -> BinaryIO:
    """The file, made if there is none, that this process alone may change or replace."""
    while True:
        file = target.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fail(f"{target}: another `legato batch` writes to it", code=WRONG_USAGE)
        if os.path.samestat(os.fstat(file.fileno()), target.stat()):
            return file
        file.close()  # it was replaced between the two


def _answers(target: Path) -> dict[str, bytes]:
    """The line of every request that is answered, by the request's name."""
    kept: dict[str, bytes] = {}
    lines = target.read_bytes().split(b"\n")
    for number, text in enumerate(lines, 1):
        is_last = number == len(lines)  # and without its end
        if not text.strip() or (is_last and text.startswith(b"{") and not _is_json(text)):
            continue
        try:
            found = json.loads(text)
            custom_id, response = found["custom_id"], found["response"]
            if response is not None and response["status_code"] == 200:
                kept[custom_id] = text
        except (ValueError, LookupError, TypeError):
            fail(
                f"{target}:{number}: not an answer; it would be lost, so name another file",
                code=WRONG_USAGE,
            )
    return kept


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def register(app: typer.Typer) -> None:
    app.command("batch")(batch)
