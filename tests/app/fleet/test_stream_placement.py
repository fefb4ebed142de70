"""How long a stream that changes engines waits for its KV."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from actors.scheduling.request import Request, SamplingParams
from app.engine_client.client import EngineUnavailable
from app.engine_client.streams import Stream
from app.fleet.connection import FleetRequest
from app.fleet.stream_placement import StreamPlacement


class Engine:
    """A connection whose engine saves nothing in time, and what it was asked."""

    engine_id = "here"

    def __init__(self) -> None:
        self.asked: list[tuple[str, float]] = []

    async def ask(self, question: str, *, within_s: float) -> None:
        self.asked.append((question, within_s))
        raise EngineUnavailable("not in time")


@pytest.mark.parametrize("took_s", [0.1, 30.0])
async def test_a_save_may_take_as_long_as_its_prompt_took(took_s: float) -> None:
    engine: Any = Engine()
    request = Request(1, (5, 6), SamplingParams(9), 0.0)
    stream = FleetRequest(request, 0, Stream(), connection=engine)
    stream.waiting_since_s = time.monotonic() - took_s
    nothing: Any = None
    placement = StreamPlacement(
        nothing, nothing, {}, start_within_s=1.0, resume_within_s=1.0, rebalance=False
    )
    placed = asyncio.Event()
    placement.place_waiting = placed.set  # type: ignore[method-assign]
    placement._hand_over(stream)
    await placed.wait()
    ((question, within_s),) = engine.asked
    assert question == "kv_saved"
    assert within_s >= max(2.0, took_s)
    assert stream.connection is None
