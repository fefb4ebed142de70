"""Streams of live engines as their caller sees them: times, tokens, and whether one engine alone
says the same."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from actors.scheduling.request import SamplingParams
from app.bench.studies.live_engine import draw_prompt
from app.engine_client.client import EngineClient, GenerationRequest


@dataclass(slots=True)
class Seen:
    """A greedy stream: its tokens, and the times of its events by `time.perf_counter`."""

    prompt: tuple[int, ...]
    times_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    came: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    def of_length(cls, num_tokens: int, front: EngineClient, chance: random.Random) -> Seen:
        """With a prompt drawn by chance, so that no engine has cached it."""
        return cls(draw_prompt(front, num_tokens, chance))

    def gaps_s(self, from_s: float = 0.0, to_s: float = float("inf")) -> list[float]:
        """Between events, of which the later one came within these times."""
        times = self.times_s
        return [b - a for a, b in itertools.pairwise(times) if from_s <= b <= to_s]

    async def until(self, num_tokens: int) -> None:
        while len(self.tokens) < num_tokens:
            self.came.clear()
            await self.came.wait()


async def follow(
    front: EngineClient, name: str, seen: Seen, num_tokens: int, salt: str | None = None
) -> None:
    """Stream so many tokens. Cached prefixes are shared by equal salts."""
    sampling = SamplingParams(max_tokens=num_tokens)
    request = GenerationRequest(name, seen.prompt, sampling, cache_salt=salt)
    async for chunk in front.generate(request):
        if chunk.tokens:
            seen.times_s.append(time.perf_counter())
            seen.tokens += chunk.tokens
            seen.came.set()


async def tokens_equal(front: EngineClient, streams: Sequence[Seen]) -> bool:
    """Whether these streams, computed anew by an engine of this front, have the same tokens."""
    alone = [Seen(seen.prompt) for seen in streams]
    asked = [
        follow(front, f"alone {number}", again, len(seen.tokens), salt="alone")
        for number, (again, seen) in enumerate(zip(alone, streams, strict=True))
    ]
    await asyncio.gather(*asked)
    return [again.tokens for again in alone] == [seen.tokens for seen in streams]
