"""Conversations for routers to compare on, and what is told of them."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise

import pytest

from app.bench.studies.routing import Talk, Turn, converse, draw_talks, figures_of
from app.engine_client.client import ModelCard
from tests.app.api.hand_engine import HandEngine


def test_conversations_are_the_same_for_every_router() -> None:
    talks = draw_talks(2.0, 100.0, seed=4)
    assert talks == draw_talks(2.0, 100.0, seed=4)
    assert 150 < len(talks) < 250
    assert all(256 <= talk.num_opening <= 1500 and 3 <= talk.num_turns <= 5 for talk in talks)


def test_a_turn_repeats_all_that_was_said() -> None:
    engine = HandEngine(ModelCard("m", "", 4096, 4000, (), 0))
    talks = [Talk(0.0, 8, 3, num_added=2, num_answered=4)]
    turns = asyncio.run(converse(engine, talks, 0.0, random.Random(1)))
    assert [turn.num_prompt_tokens for turn in turns] == [8, 14, 20]
    prompts = [request.prompt for request in engine.seen]
    for before, after in pairwise(prompts):
        assert after[: len(before)] == before


def test_figures_count_hits_by_token_and_failures_apart() -> None:
    found = figures_of([Turn(100, 0, 0.2), Turn(300, 200, 0.1), Turn(100, 0, None)])
    assert (found["num_turns"], found["num_failed"]) == (3, 1)
    assert found["hit_share"] == pytest.approx(0.4)
    assert found["ttft_mean_ms"] == pytest.approx(150.0)
