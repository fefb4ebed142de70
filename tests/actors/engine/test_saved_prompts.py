"""Fronts hear of each saved block once, in a prompt's order, and of nothing else."""

from __future__ import annotations

from typing import Any

from actors.engine.peers import first_id
from actors.engine.saved_prompts import SavedPrompts
from actors.scheduling.events import KVMove, Save, TierChange
from actors.scheduling.state import prefix_digests
from actors.transport.messages import KVSaved, pack_kind, unpack_kind
from tests.actors.engine.paper_engine import Engine, background
from tests.actors.scheduling import short_lives
from tests.actors.scheduling.driver import Driver
from tests.actors.scheduling.test_second_tier import config, request


class Told:
    """A driver whose prompts are followed as the loop does it."""

    def __init__(self, **changes: Any) -> None:
        self.driver = Driver(config(hands_over=True, token_budget=8, **changes))
        self.messages: list[KVSaved] = []
        self.saved = SavedPrompts(self.driver.core, self.messages.append)
        self.num_plans = 0

    def follow(self) -> None:
        for plan in self.driver.plans[self.num_plans :]:
            self.saved.started([start.request_id for start in plan.started])
        self.num_plans = len(self.driver.plans)
        self.saved.tell()

    def submit(self, number: int, **changes: Any) -> None:
        self.driver.submit(request(number, **changes))
        self.follow()

    def answer(self) -> None:
        self.driver.answer()
        self.follow()

    def answer_move(self, **how: Any) -> None:
        self.driver.answer_move(**how)
        self.follow()

    def drain(self) -> None:
        while self.driver.outstanding or self.driver.moves:
            self.answer() if self.driver.outstanding else self.answer_move()

    def of(self, number: int) -> list[bytes]:
        return [d for m in self.messages if m.request_id == number for d in m.digests]


def test_each_chunk_is_told_once_it_is_saved() -> None:
    told, chain = Told(), prefix_digests(request(1).prompt, 4)
    told.submit(1)
    told.answer()
    assert told.messages == []
    told.answer_move()
    assert told.messages == [KVSaved(1, tuple(chain[:2]))]
    told.drain()
    assert told.of(1) == chain, "after its last token too"
    assert len(told.messages) > 2
    assert told.saved.num_open == 0
    assert unpack_kind(pack_kind(told.messages[0])) == told.messages[0]


def test_what_was_saved_before_is_told_at_the_start() -> None:
    told, chain = Told(), prefix_digests(request(1).prompt, 4)
    told.submit(1)
    told.drain()
    told.submit(2)
    assert told.messages[-1] == KVSaved(2, tuple(chain))
    told.drain()
    assert told.of(2) == chain


def test_a_block_that_was_not_saved_ends_what_is_told() -> None:
    told, chain = Told(), prefix_digests(request(1).prompt, 4)
    told.submit(1)
    told.answer()
    told.answer_move(most=1)
    told.drain()
    assert told.of(1) == chain[:1]
    assert told.saved.num_open == 0, "nothing more can come"


def test_an_aborted_prompt_is_forgotten() -> None:
    told = Told()
    told.submit(1)
    told.answer()
    told.driver.abort(1)
    told.follow()
    told.drain()
    assert told.saved.num_open == 0


def test_an_aborted_prompt_is_forgotten_while_others_are_saved() -> None:
    """A busy engine may always have something to save."""
    told = Told()
    told.submit(1)
    told.answer()
    told.submit(2, kind=2)
    told.driver.abort(1)
    for _ in range(3):
        told.answer()
    assert told.saved.num_open == 2
    while told.saved.num_open == 2:
        assert told.driver.moves, "all is saved"
        told.answer_move()
    assert told.driver.moves
    told.drain()
    assert told.of(2) == prefix_digests(request(2, kind=2).prompt, 4)


def test_prompts_that_leave_nothing_to_save_are_forgotten_as_they_end() -> None:
    """With no save to follow: aborted in the first step, or once all blocks so far are saved."""
    told = Told()
    told.submit(1)
    told.driver.abort(1)
    told.follow()
    assert told.saved.num_open == 1, "steps that compute its blocks are in flight"
    while told.driver.outstanding:
        told.answer()
    assert not told.driver.moves
    assert told.saved.num_open == 0
    told.submit(2, kind=2)
    told.answer()
    while told.driver.moves:
        told.answer_move()
    assert told.of(2)
    told.driver.abort(2)
    told.follow()
    while told.driver.outstanding:
        told.answer()
    assert not told.driver.moves
    assert told.saved.num_open == 0


async def test_the_loop_tells_the_front_that_asked() -> None:
    engine = Engine(hands_over=True, tier_ranks=1, tier_shared=True, prefix_cache=True)
    number = first_id(3) + 1
    one = short_lives.request(number, prompt=20, output=1)

    async def move(move: KVMove) -> Any:
        assert isinstance(move, Save)
        return [(len(move.blocks), TierChange(tuple(digest for _, digest in move.blocks)))]

    engine.stages.move = move
    engine.submit(one)
    while engine.stages.unanswered:
        engine.stages.answer()
        while engine.core.tier.moves:  # type: ignore[union-attr]
            await background()
    size = engine.core.config.block_size
    told = [(to, m) for to, m in engine.wires.sent if isinstance(m, KVSaved)]
    assert {to for to, _ in told} == {3}
    assert [d for _, m in told for d in m.digests] == prefix_digests(one.prompt, size)
