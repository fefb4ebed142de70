"""Servers with and without speculation: answers of a real server, rates, equality of text."""

from __future__ import annotations

import pytest

from app.bench.load.client import LoadClient
from app.bench.report import MeasurementError
from app.bench.speculating import Answer, Asked, Pair, in_turn, pair_rows
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
    pairs = await in_turn(Asked(several, MODEL), Asked(plain, MODEL), prompts, 12)
    base = sum(prompts["one"][0])
    assert pairs["one"][0].plain.text == "".join(chr(97 + (base + i * 7) % 26) for i in range(12))
    assert [len(each) for each in pairs.values()] == [2, 1]
    for pair in (*pairs["one"], *pairs["other"]):
        assert pair.drafted.text == pair.plain.text
        assert pair.drafted.rate > 0 < pair.plain.rate


async def test_every_prompt_goes_once_to_each_and_the_first_alternates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[str, int]] = []

    async def answer(asked: Asked, prompt: list[int], num_tokens: int) -> Answer:
        seen.append((asked.model, prompt[0]))
        return Answer(float(prompt[0]), asked.model)

    monkeypatch.setattr("app.bench.speculating._answer", answer)
    client = LoadClient("http://127.0.0.1:1", MODEL)
    pairs = await in_turn(Asked(client, "drafts"), Asked(client, "plain"), {"one": [[1], [2]]}, 4)
    assert seen == [("plain", 1), ("drafts", 1), ("drafts", 2), ("plain", 2)]
    assert [(pair.drafted.text, pair.plain.text) for pair in pairs["one"]] == [
        ("drafts", "plain")
    ] * 2


async def test_an_answer_that_is_cut_short_is_no_figure(start_server: StartServer) -> None:
    _, client = await served(start_server, fail_at=4)
    with pytest.raises(MeasurementError):
        await in_turn(Asked(client, MODEL), Asked(client, MODEL), {"one": [[5]]}, 12)


async def test_a_refusal_is_quoted(start_server: StartServer) -> None:
    _, client = await served(start_server)
    with pytest.raises(MeasurementError, match=r"404: .*absent"):
        await in_turn(Asked(client, MODEL), Asked(client, "absent"), {"one": [[5]]}, 12)


def test_a_pair_is_compared_prompt_by_prompt_and_round_by_round() -> None:
    rounds = [
        {
            "copying": [
                Pair(Answer(20.0, "abc"), Answer(10.0, "abc")),
                Pair(Answer(40.0, "de"), Answer(20.0, "de")),
            ]
        },
        {
            "copying": [
                Pair(Answer(30.0, "abX"), Answer(10.0, "abc")),
                Pair(Answer(80.0, "df"), Answer(40.0, "df")),
            ]
        },
    ]
    (row,) = pair_rows({"fast": rounds})
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


def test_a_server_has_no_row_before_it_has_run() -> None:
    assert pair_rows({"fast": []}) == []
