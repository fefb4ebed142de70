"""The replica's link to a real scheduler: tokens delivered, questions answered, ends noticed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from actors.scheduling.events import Refuse
from actors.scheduling.request import FinishReason, Request, SamplingParams
from actors.transport.messages import IterationRecord
from app.engine_client.channel import EngineMessage, QuestionFailed
from app.engine_client.client import EngineUnavailable, RequestRefused
from app.engine_client.link import EngineFailed, SchedulerLink
from app.engine_client.standby import Standby
from app.engine_client.streams import OpenRequests, Stream
from app.settings.load import parse, resolve
from tests.tiny_models import LASTING

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


class Replica:
    """The owner of a link, and what the link has said to it."""

    def __init__(self, model: Path, **sections: Any) -> None:
        args = {"model": {"path": str(model)}, "kv": {"memory_gib": 0.01}, **sections}
        self.requests = OpenRequests()
        self.refusals: asyncio.Queue[Refuse] = asyncio.Queue()
        self.records: asyncio.Queue[Any] = asyncio.Queue()
        self.lost = asyncio.Event()
        config = resolve(parse(args))
        self.standby = Standby(config, lambda *asked: self.link.ask(*asked))
        self.link = SchedulerLink(config, self.requests, self, self.standby)

    def on_records(self, records: Sequence[Any]) -> None:
        for record in records:
            self.records.put_nowait(record)

    def on_refusal(self, refusal: Refuse) -> None:
        self.refusals.put_nowait(refusal)

    def on_message(self, message: EngineMessage) -> None:
        pass

    def on_lost(self) -> None:
        self.lost.set()

    def submit(self, request: Request) -> Stream:
        stream = Stream()
        self.requests.add([request], stream)
        self.link.submit([request])
        return stream


async def read(stream: Stream, num_known: int = 0) -> tuple[list[int], FinishReason | None]:
    """The tokens that a stream still gets, and how it ends."""
    tokens, reason = list[int](), None
    async with asyncio.timeout(60):
        while chunks := await stream.get():
            for chunk in chunks:
                assert chunk.first == num_known + len(tokens)
                tokens += chunk.tokens
                reason = chunk.finish_reason
    return tokens, reason


async def test_a_life_of_the_link(tiny_model: Callable[..., Path]) -> None:
    replica = Replica(tiny_model("llama", **LASTING))  # else a stream may end before it is aborted
    link = replica.link
    info, num_blocks = await link.open()
    assert link.is_open
    assert num_blocks > 1

    tokens, reason = await read(replica.submit(Request(1, (5, 6, 7), SamplingParams(6), 0.0)))
    assert (len(tokens), reason) == (6, FinishReason.LENGTH)

    replica.submit(Request(2, (5,) * info.max_model_len, SamplingParams(6), 0.0))
    refusal = await asyncio.wait_for(replica.refusals.get(), 60)
    assert (refusal.request_id, refusal.param) == (2, "prompt")

    endless = SamplingParams(10_000, min_tokens=10_000)
    stream = replica.submit(Request(3, (5, 6, 7), endless, 0.0))
    (chunk,) = await asyncio.wait_for(stream.get(), 60)
    link.abort([3])
    assert (await read(stream, len(chunk.tokens)))[1] is FinishReason.ABORT

    status = await link.ask("status")
    assert status["num_waiting"] == status["num_decoding"] == status["num_prefilling"] == 0
    with pytest.raises(RequestRefused, match="unknown") as caught:
        await link.reconfigure({"polic": "orca"})
    assert caught.value.param == "polic"
    with pytest.raises(QuestionFailed, match="TypeError"):
        await link.ask("reconfigure")
    await link.reconfigure({"policy": "orca"})
    assert (await link.ask("status"))["policy"] == "orca"
    async with asyncio.timeout(60):  # six steps of the first request, one at least of the third
        steps = [IterationRecord(*await replica.records.get()).step for _ in range(7)]
    assert steps == sorted(set(steps))

    await link.close()
    assert not replica.lost.is_set()
    with pytest.raises(EngineUnavailable):
        await link.ask("status")


async def test_a_killed_scheduler_is_noticed_once(tiny_model: Callable[..., Path]) -> None:
    replica = Replica(tiny_model())
    await replica.link.open()
    asked = asyncio.create_task(replica.link.ask("status"))
    replica.link.kill()
    await asyncio.wait_for(replica.lost.wait(), 60)
    assert not replica.link.is_open
    await asyncio.wait({asked})
    assert asked.exception() is None or isinstance(asked.exception(), EngineUnavailable)
    with pytest.raises(EngineUnavailable):
        await replica.link.ask("status")
    replica.link.submit([Request(1, (5,), SamplingParams(1), 0.0)])  # dropped: `lost` has told


async def test_what_the_loader_says_is_the_error(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "cut"
    folder.mkdir()
    for file in tiny_model().iterdir():
        data = file.read_bytes()
        cut = len(data) // 2 if file.suffix == ".safetensors" else len(data)
        (folder / file.name).write_bytes(data[:cut])
    with pytest.raises(EngineFailed, match="safetensors"):
        await Replica(folder).link.open()
