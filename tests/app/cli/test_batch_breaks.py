"""`legato batch` over connections that break and a proxy whose server is away."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from app.api.batches import runner
from app.api.batches.lines import Line
from app.api.batches.runner import LAST, QUOTE
from app.cli.batch import Waits, answer_all

URL = "/v1/completions"
QUOTED = {"prompt_tokens": 1, "can_serve_now": True, "retry_after_s": None}
Trouble = Callable[[], httpx.Response]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(runner, "_LONGEST_PAUSE_S", 0.01)


def refused() -> httpx.Response:
    raise httpx.ConnectError("refused")


def reset() -> httpx.Response:
    raise httpx.ReadError("reset")


def page(status: int) -> Trouble:
    """What a proxy shows in the place of the server."""
    return lambda: httpx.Response(status, html="<h1>Sorry</h1>", headers={"retry-after": "0"})


class Way:
    """The way to a server: the troubles on it, each met once, by those that are sent there."""

    def __init__(self) -> None:
        self.quotes: list[Trouble] = []
        self.sends: list[Trouble] = []
        self.any: list[Trouble] = []
        self.breaks = ""  # the prompt that ends its connection, whenever it is sent
        self.has_quotes = True
        self.seen: list[dict[str, Any]] = []

    def pass_on(self, request: httpx.Request) -> httpx.Response:
        is_quote = request.url.path == QUOTE
        for troubles in (self.any, self.quotes if is_quote else self.sends):
            if troubles:
                return troubles.pop(0)()
        if is_quote:
            return httpx.Response(200, json=QUOTED) if self.has_quotes else page(404)()
        self.seen.append(json.loads(request.content))
        return reset() if self.seen[-1]["prompt"] == self.breaks else httpx.Response(200, json={})

    async def run(self, *prompts: str, give_up_s: float = 60.0) -> dict[str, Any]:
        """The answers by their prompts."""
        file = io.BytesIO()
        lines = [Line(prompt, URL, {"prompt": prompt}) for prompt in prompts]
        transport = httpx.MockTransport(self.pass_on)
        async with httpx.AsyncClient(base_url="http://h", transport=transport) as client:
            await answer_all(client, lines, file, 1, give_up_s)
        answers = [json.loads(text) for text in file.getvalue().splitlines()]
        return {answer["custom_id"]: answer for answer in answers}


@pytest.fixture
def way() -> Way:
    return Way()


def is_done(answer: dict[str, Any]) -> bool:
    return answer["response"] is not None and answer["response"]["status_code"] == 200


@pytest.mark.parametrize("trouble", [refused, reset, page(429), page(502), page(503), page(504)])
async def test_a_quote_that_fails_takes_no_priority_away(way: Way, trouble: Trouble) -> None:
    way.quotes = [trouble] * 2
    assert is_done((await way.run("a"))["a"])
    assert [body.get("priority") for body in way.seen] == [LAST]


@pytest.mark.parametrize("status", [404, 405])
async def test_a_server_without_quotes_gets_what_the_line_says(way: Way, status: int) -> None:
    way.quotes = [page(status)]
    assert is_done((await way.run("a"))["a"])
    assert way.seen == [{"prompt": "a"}]


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_a_proxys_page_is_waited_for_as_an_error_of_the_server(way: Way, status: int) -> None:
    way.any = [page(status)] * 12
    assert is_done((await way.run("a"))["a"])


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        (page(429), "the server is busy; asking again"),
        (page(503), "the server is busy; asking again"),
        (page(502), "the server does not answer; asking again"),
        (refused, "the server does not answer; asking again"),
    ],
)
async def test_a_terminal_is_told_why_a_request_is_sent_again(
    way: Way, trouble: Trouble, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = list[str]()
    say = Waits._say

    def noted(waits: Waits, text: str) -> None:
        shown.append(text)
        say(waits, text)

    monkeypatch.setattr(Waits, "_say", noted)
    way.sends = [trouble]
    assert is_done((await way.run("a"))["a"])
    assert [text for text in shown if text] == [said]


async def test_a_page_in_the_place_of_quotes_holds_nothing_up(way: Way) -> None:
    way.quotes = [page(200)] * 100
    assert is_done((await way.run("a"))["a"])


async def test_a_request_that_a_proxy_refuses_for_good_says_so(way: Way) -> None:
    way.sends = [page(413)]
    response = (await way.run("a"))["a"]["response"]
    assert response["status_code"] == 413
    assert "413" in response["body"]["error"]["message"]


@pytest.mark.parametrize("trouble", [refused, reset])
@pytest.mark.parametrize("has_quotes", [True, False])
async def test_a_server_that_is_away_is_waited_for(
    way: Way, trouble: Trouble, has_quotes: bool
) -> None:
    way.has_quotes = has_quotes
    way.quotes = [page(404)] * (not has_quotes)

    def leave() -> httpx.Response:
        way.any = [trouble] * 20
        return trouble()

    way.sends = [leave]
    assert all(map(is_done, (await way.run("a", "b")).values()))


async def test_waiting_for_a_server_ends_with_the_time_of_the_run(way: Way) -> None:
    way.any = [refused] * 100_000
    assert (await way.run("a", give_up_s=0.1))["a"]["error"]["code"] == "batch_expired"


@pytest.mark.parametrize("has_quotes", [True, False])
async def test_a_request_that_always_breaks_its_connection_fails(
    way: Way, has_quotes: bool
) -> None:
    way.has_quotes, way.breaks = has_quotes, "b"
    answers = await way.run("a", "b", "c")
    assert is_done(answers["a"])
    assert is_done(answers["c"])
    assert answers["b"]["error"]["code"] == "connection_failed"


async def test_a_request_that_always_is_too_long_for_a_proxy_fails(way: Way) -> None:
    way.sends = [page(504)] * 100
    assert (await way.run("a"))["a"]["response"]["status_code"] == 504
