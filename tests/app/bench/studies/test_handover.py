"""What is told of streams that were handed over, and when one moves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from app.bench.report import MeasurementError
from app.bench.studies.followed import Seen
from app.bench.studies.handover import figures, moves
from app.bench.studies.kv_log import Continued
from app.engine_client.client import GenerationRequest, TokenChunk


def seen(num_tokens: int, *times_s: float) -> Seen:
    return Seen((0,) * num_tokens, list(times_s))


def moved(num_tokens: int, num_fetched: int, pause_s: float) -> Continued:
    return Continued(num_tokens, num_fetched, num_fetched // 2, 1.0, 1.0, None, 1.0, 1.0 + pause_s)


def test_the_pause_is_the_gap_before_the_second_token() -> None:
    probes = [seen(500, 1.0, 1.2, 1.23), seen(500, 2.0, 2.1, 2.15), seen(1000, 3.0, 3.4, 3.5)]
    streams = [moved(501, 31, 0.2), moved(501, 31, 0.1), moved(1001, 62, 0.4)]
    short, long = figures(probes, streams, 2e6)
    assert (short["prompt_tokens"], short["num_streams"]) == (500, 2)
    assert short["pause_p50_ms"] == pytest.approx(150.0)
    assert short["pause_p99_ms"] == pytest.approx(199.0)
    assert (short["fetched_mb"], short["early_mb"]) == (62.0, 30.0)
    assert long["pause_p50_ms"] == pytest.approx(400.0)
    assert long["later_tbt_p50_ms"] == pytest.approx(100.0)
    assert long["parts_p50_ms"]["computed"] == pytest.approx(400.0)
    with pytest.raises(MeasurementError, match="1000 tokens"):
        figures(probes, streams[:2], 2e6)


class Front:
    """Its stream is at the first engine that has not left; every move takes ten naps."""

    card = SimpleNamespace(vocab_size=1000)

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.left: list[str] = []

    @property
    def here(self) -> str:
        return next(name for name in self.names if name not in self.left)

    async def status(self) -> dict[str, Any]:
        engines = [{"id": f"{n}.ab", "num_streams_here": int(n == self.here)} for n in self.names]
        return {"engines": engines}

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        for number in range(request.sampling.max_tokens):
            await asyncio.sleep(0)
            yield TokenChunk(0, number, [number])

    def engine(self, name: str) -> Any:
        async def leave() -> None:
            self.left.append(name)

        return SimpleNamespace(leave=leave)


async def test_engines_leave_while_they_have_the_stream() -> None:
    front = Front(["engine-0", "engine-1", "engine-2"])
    fleet = SimpleNamespace(engines={name: front.engine(name) for name in front.names})
    rows, seen = await moves(fleet, front, 2000, 2)  # type: ignore[arg-type]
    assert front.left == ["engine-0", "engine-1"]
    assert [row["num_tokens"] for row in rows] == pytest.approx([2000, 2060], abs=25)
    assert all(row["pause_ms"] > 0 for row in rows)
    assert len(seen.prompt) + len(seen.tokens) > 2060
