"""Servers with and without speculation: answers of a real server, rates, equality of text."""

from __future__ import annotations

import pytest

from app.bench.load.client import LoadClient
from app.bench.report import MeasurementError
from app.bench.speculating import Answer, answers, pairs, rates
from tests.app.api.conftest import MODEL, Server, StartServer, protocol, start_server, text

__all__ = ["protocol", "start_server", "text"]  # fixtures


async def served(start: StartServer, **engine: int) -> tuple[Server, LoadClient]:
    server = await start()
    for name, value in engine.items():
        setattr(server.engine, name, value)
    return server, LoadClient(server.url, MODEL)


async def test_tokens_that_arrive_together_change_no_text(start_server: StartServer) -> None:
    prompts = {"one": [[5, 6, 7], [8]], "other": [[9, 9]]}
    _, plain = await served(start_server)
    _, several = await served(start_server, chunk_size=3)
    alone = await answers(plain, MODEL, prompts, 12)
    together = await answers(several, MODEL, prompts, 12)
    base = sum(prompts["one"][0])
    assert alone["one"][0].text == "".join(chr(97 + (base + i * 7) % 26) for i in range(12))
    for task, each in alone.items():
        assert [a.text for a in together[task]] == [a.text for a in each]
        assert all(a.rate > 0 for a in [*each, *together[task]])


async def test_an_answer_that_is_cut_short_is_no_figure(start_server: StartServer) -> None:
    _, client = await served(start_server, fail_at=4)
    with pytest.raises(MeasurementError):
        await answers(client, MODEL, {"one": [[5]]}, 12)


async def test_a_refusal_is_quoted(start_server: StartServer) -> None:
    _, client = await served(start_server)
    with pytest.raises(MeasurementError, match=r"404: .*absent"):
        await answers(client, "absent", {"one": [[5]]}, 12)


def test_a_rate_is_the_median_over_prompts() -> None:
    given = {"copying": [Answer(rate, "") for rate in (10.0, 90.0, 20.0)]}
    assert rates(given) == {"copying, tokens/s": 20.0}


def test_a_pair_is_compared_prompt_by_prompt_and_round_by_round() -> None:
    plain = [
        {"copying": [Answer(10.0, "abc"), Answer(20.0, "de")]},
        {"copying": [Answer(10.0, "abc"), Answer(40.0, "df")]},
    ]
    fast = [
        {"copying": [Answer(20.0, "abc"), Answer(40.0, "de")]},
        {"copying": [Answer(30.0, "abX"), Answer(80.0, "df")]},
    ]
    (row,) = pairs({"fast": "plain"}, {"fast": fast, "plain": plain})
    assert row == {
        "server": "fast",
        "task": "copying",
        "plain_tokens_per_s": 15.0,
        "tokens_per_s": 35.0,
        "speed_up": 2.0,
        "texts": 4,
        "same_text": 3,
        "plain_repeats": 3,
    }


def test_a_pair_has_no_row_before_both_have_run() -> None:
    given = {"copying": [Answer(10.0, "abc")]}
    assert pairs({"fast": "plain"}, {"fast": [], "plain": [given]}) == []
    assert pairs({"fast": "plain"}, {"fast": [given]}) == []
