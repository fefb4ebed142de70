"""`legato bench fuzz`: bad requests and bytes; none may be answered with 500 or with silence."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import httpx
import typer
from rich.progress import Progress

from app.bench.chaos.bad_bytes import BadBytes, bad_bytes
from app.bench.chaos.bad_requests import BadRequest, bad_requests, tokens_asked
from app.bench.chaos.own_server import own_server
from app.bench.chaos.probe import probing
from app.bench.load.client import ask, authorization, first_model, server_root
from app.bench.load.serve import ApiKey
from app.bench.report import MeasurementError, make_report, publish
from app.bench.terminal import Json, Out, console, output, table
from app.paths import DEMO_CONFIG

if TYPE_CHECKING:
    import aiohttp

ANSWERS_WITHIN_S = 30.0
TOKEN_WITHIN_S = 0.1  # more for each token that is asked for
LAG_WITHIN_MS = 100.0
_RAW_SHARE = 0.2
_CONTEXT = 4096  # of a server whose list of models does not tell
_SHOWN = 20


@dataclass(slots=True)
class FuzzCount:
    """Counts of a run. wrong: unacceptable answers, with their requests."""

    statuses: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def note(self, bad: BadRequest, status: int, text: bytes) -> None:
        self.statuses[str(status)] += 1
        self.kinds[bad.kind] += 1
        if status < 300:
            self.accepted[bad.kind] += 1
        elif (status >= 500 and status != 503) or not _explains(text, bad):
            self.fail(f"{status} {bad.kind}: {bad.method} {bad.path}", bad.content, text)

    def note_bytes(self, bad: BadBytes, answer: bytes | None) -> None:
        kind = f"bytes: {bad.kind}"
        self.kinds[kind] += 1
        status = answer[9:12].decode("latin-1") if answer and answer.startswith(b"HTTP/") else ""
        self.statuses[status or ("silence" if answer is None else "closed")] += 1
        if status.startswith("5") or (answer is None and bad.is_whole):
            self.fail(f"{status or 'no answer'} {kind}", bad.content, answer or b"")

    def fail(self, what: str, content: bytes, text: bytes) -> None:
        self.wrong.append(f"{what} {content[:300]!r} -> {text[:200]!r}")


def _explains(text: bytes, bad: BadRequest) -> bool:
    """Whether a refusal has a message."""
    return len(text) > 2 or bad.method in ("HEAD", "TRACE")


class Fuzzer:
    """Sends bad requests and bytes, `places` at a time."""

    def __init__(
        self, url: str, num_requests: int, seed: int, places: int, api_key: str | None = None
    ) -> None:
        self._url = url
        self._num_left = num_requests
        self._places = places
        self._headers = headers = authorization(api_key)
        document = ask(f"{url}/openapi.json", 30.0, headers).json()
        name = first_model(url, api_key)
        self._requests: Iterator[BadRequest] = bad_requests(document, seed, name)
        listed = ask(f"{url}/v1/models", 30.0, headers)
        model = listed.json()["data"][0]
        self._context = int(model.get("max_model_len", _CONTEXT))
        self._bytes: Iterator[BadBytes] = bad_bytes(seed)
        self.count = FuzzCount()

    async def run(self, on_done: Callable[[], None]) -> dict[str, Any]:
        import aiohttp

        begin_s = time.monotonic()
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            probing(self._url, self._headers) as live,
            aiohttp.ClientSession(connector=connector) as session,
        ):
            raw_places = max(1, round(_RAW_SHARE * self._places))
            await asyncio.gather(
                *[self._send_requests(session, on_done) for _ in range(self._places)],
                *[self._send_bytes(on_done) for _ in range(raw_places)],
            )
        return {"seconds": time.monotonic() - begin_s, "live": live}

    def _claim_one(self) -> bool:
        self._num_left -= 1
        return self._num_left >= 0

    async def _send_requests(
        self, session: aiohttp.ClientSession, on_done: Callable[[], None]
    ) -> None:
        import aiohttp
        import yarl

        while self._claim_one():
            bad = next(self._requests)
            url = yarl.URL(self._url + bad.path, encoded=True)
            headers = {"content-type": bad.content_type, **self._headers}
            limit = aiohttp.ClientTimeout(total=answers_within_s(bad, self._context))
            try:
                async with session.request(
                    bad.method,
                    url,
                    data=bad.content,
                    headers=headers,
                    allow_redirects=False,
                    timeout=limit,
                ) as answer:
                    self.count.note(bad, answer.status, await answer.read())
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                self.count.kinds[bad.kind] += 1
                self.count.statuses[type(error).__name__] += 1
                self.count.fail(f"{error!r} {bad.kind}: {bad.path}", bad.content, b"")
            on_done()

    async def _send_bytes(self, on_done: Callable[[], None]) -> None:
        address = urlsplit(self._url)
        while self._claim_one():
            bad = next(self._bytes)
            answer: bytes | None = b""
            with suppress(ConnectionError):
                reader, writer = await asyncio.open_connection(address.hostname, address.port)
                try:
                    answer = await _exchange(reader, writer, bad)
                finally:
                    writer.transport.abort()
            self.count.note_bytes(bad, answer)
            on_done()


def answers_within_s(bad: BadRequest, context: int) -> float:
    """Time limit of an answer: a request that is served after all may fill the context."""
    return ANSWERS_WITHIN_S + TOKEN_WITHIN_S * tokens_asked(bad, context)


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bad: BadBytes
) -> bytes | None:
    """The first bytes of the answer; empty when the connection was closed, None for silence."""
    writer.write(bad.content)
    wait_s = ANSWERS_WITHIN_S if bad.is_whole else 0.03
    try:
        async with asyncio.timeout(wait_s):
            await writer.drain()
            return await reader.read(4096)
    except TimeoutError:
        return None


def command(
    context: typer.Context,
    requests: Annotated[int, typer.Option(min=1, help="Bad requests to send.")] = 100_000,
    seed: Annotated[int, typer.Option(help="They are drawn from it.")] = 0,
    url: Annotated[
        str | None, typer.Option(help="A running server; without it, one of the demo model.")
    ] = None,
    api_key: ApiKey = None,
    places: Annotated[int, typer.Option(min=1, help="Connections at a time.")] = 4,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Bad requests, drawn from the server's schema, and bad bytes: no 500, no hang, no lag.

    Exits with status 1 on an answer of 500 or none, or if the replica's event loop was late by
    100 ms, waits for a core left out.
    """
    if url is not None:
        found = measure(server_root(url), requests, seed, places, api_key)
    else:
        with own_server(DEMO_CONFIG, {}, Path("out/fuzz-server.log")) as server:
            found = measure(server.url, requests, seed, places)
    publish(make_report(context, found), as_json, out)
    if not as_json:
        rows = [(status, str(count)) for status, count in found["statuses"].items()]
        output.print(table(f"{requests} bad requests", ("answer", "times"), rows))
        live, late = found["live"], found["live"]["own_wakeups_late_ms"]
        output.print(
            f"/live: P99 {live['ms']['p99']:.0f} ms, longest {live['ms']['longest']:.0f} ms (the "
            f"machine woke the probe up to {late['longest']:.0f} ms late)"
        )
        output.print(f"the replica's event loop: {lag_text(live['loop_lag'])}")
        for line in found["wrong"]:
            console.print(line, markup=False, soft_wrap=True)
    if not found["is_clean"]:
        raise typer.Exit(1)


def lag_text(lag: Mapping[str, Any] | None) -> str:
    """The lateness of the event loop, in words."""
    if lag is None:
        return "its /metrics do not tell"
    most = lag["at_most_ms"]
    late = "late by seconds" if most is None else f"never late by {most:.0f} ms"
    return f"{late}; it waited {lag['waited_for_core_s']:.1f} s for a core"


def measure(
    url: str, num_requests: int, seed: int, places: int, api_key: str | None = None
) -> dict[str, Any]:
    """Raises MeasurementError where nothing answers. A server that does not tell of its event loop
    is judged by its answers alone."""
    try:
        fuzzer = Fuzzer(url, num_requests, seed, places, api_key)
    except (httpx.HTTPError, ValueError) as error:
        raise MeasurementError(f"no schema at {url}/openapi.json: {error}") from error
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("bad requests", total=num_requests)
        run = asyncio.run(fuzzer.run(lambda: progress.advance(task)))
    count = fuzzer.count
    live = run["live"]
    lag_ms = live["loop_lag"]["at_most_ms"] if live["loop_lag"] else 0.0
    in_time = lag_ms is not None and lag_ms <= LAG_WITHIN_MS and not live["num_failures"]
    return {
        **run,
        "statuses": dict(sorted(count.statuses.items())),
        "kinds": dict(sorted(count.kinds.items())),
        "accepted": dict(count.accepted),
        "num_wrong": len(count.wrong),
        "wrong": count.wrong[:_SHOWN],
        "live_in_time": in_time,
        "is_clean": not count.wrong and in_time,
    }
