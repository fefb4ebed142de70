"""Streams are followed, and ways compared by their tokens: on live engines of a tiny model, and
where tokens differ."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.bench.load.client import Job, Trace
from app.bench.studies import live_ways
from app.bench.studies.followed import Seen, tokens_equal
from app.bench.studies.handover import hand_overs, moves
from app.bench.studies.live_fleet import live_engines, router_of
from app.bench.studies.live_ways import ENGINES, WAYS, NamedLoad, serve_all
from app.engine_client.client import GenerationRequest, TokenChunk
from tests.app.fleet.live.conftest import sections as sections
from tests.app.fleet.live.test_draining import unhurried as unhurried


def test_gaps_count_by_their_end() -> None:
    assert Seen((), [1.0, 2.0, 4.0, 4.5]).gaps_s(1.5, 4.0) == [1.0, 2.0]


class Counting:
    """Answers every prompt with the numbers from its first token on."""

    card = SimpleNamespace(vocab_size=1000)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        for number in range(request.sampling.max_tokens):
            yield TokenChunk(0, number, [request.prompt[0] + number])


async def test_a_stream_of_other_tokens_is_found() -> None:
    front: Any = Counting()
    right, wrong = Seen((5, 1), tokens=[5, 6, 7]), Seen((9,), tokens=[9, 11])
    assert await tokens_equal(front, [right])
    assert not await tokens_equal(front, [right, wrong])


def test_a_way_of_other_tokens_is_found() -> None:
    def rounds(*tokens: int) -> list[list[Trace]]:
        return [[Trace(Job(0.0, 1, 1), tokens=[token]) for token in tokens]]

    traces = {("chat", way): rounds(1, 2) for way in WAYS}
    assert live_ways.tokens_equal(traces, "chat")
    traces["chat", "flexible"] = rounds(1, 3)
    assert not live_ways.tokens_equal(traces, "chat")


@pytest.mark.long
@pytest.mark.ray
async def test_live_engines_give_the_same_tokens(
    ray_cluster: None,
    tiny_model: Callable[..., Path],
    sections: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    unhurried: None,
) -> None:
    monkeypatch.setattr("app.bench.studies.live_ways._WARM_S", 0.2)
    monkeypatch.setattr("app.bench.studies.live_ways._WARM_LENGTHS", (1, 64))
    folder = tiny_model("llama", max_position_embeddings=2048)  # streams are long until they move
    args = {**sections, "model": {"path": str(folder)}}
    async with live_engines(args, ENGINES) as fleet:
        _, traces = await serve_all(fleet, [NamedLoad.parse("chat=90x20@30", 0.5, 0)], 2)
        found = [[t.tokens for t in traces["chat", "split"][i]] for i in range(2)]
        assert found[0] != found[1], "each round has prompts of its own"
        assert all(len(tokens) == 20 for tokens in found[0])
        assert live_ways.tokens_equal(traces, "chat")
        async with fleet.front(router_of("split"), WAYS["split"]) as front:
            probes, _ = await hand_overs(front, [70, 100], 2, 1)
            assert (await front.status())["fleet"]["num_hand_overs"] >= len(probes)
        async with fleet.front(router_of("colocated"), ("two",)) as front:
            assert await tokens_equal(front, probes)
        async with fleet.front(router_of("colocated"), WAYS["colocated"]) as front:
            rows, seen = await moves(fleet, front, 100, 1)
            assert (await front.status())["fleet"]["num_moves"] == len(rows) == 1
            assert await tokens_equal(front, [seen])
