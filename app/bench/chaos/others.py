"""A few streams in a process of their own: what others see of a server's load."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from multiprocessing.connection import Connection

from app.bench.chaos.own_server import OwnServer
from app.bench.load.client import Job, LoadClient, Trace
from app.bench.report import MeasurementError

NUM_OTHERS = 4
_NUM_TOKENS = 3500
_BEGIN_WITHIN_S = 120.0


@asynccontextmanager
async def other_streams(server: OwnServer) -> AsyncGenerator[Connection]:
    """A few streams, one set after the other, in a process of their own; they decode.

    On the connection: a time from and to (`time.monotonic`), and back come all times between
    tokens within, or what failed."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_run, args=(theirs, server.url, server.model))
    process.start()
    theirs.close()
    try:
        if not await asyncio.to_thread(ours.poll, _BEGIN_WITHIN_S):
            raise MeasurementError("the other streams got no token")
        ours.recv()
        yield ours
    finally:
        ours.close()  # which ends them
        await asyncio.to_thread(process.join)


def _run(asked: Connection, url: str, model: str) -> None:
    asyncio.run(_answer(asked, LoadClient(url, model)))


async def _answer(asked: Connection, client: LoadClient) -> None:
    """Until the other end is closed."""
    begin_s = time.monotonic() - time.perf_counter()
    traces: list[Trace] = []
    loop = asyncio.get_running_loop()

    async def stream() -> None:
        async with client.session() as session:
            while True:
                trace = await client.send(session, Job(0.0, 16, _NUM_TOKENS), 0.0, traces.append)
                if trace.error:
                    raise MeasurementError(trace.error)

    streams = [asyncio.create_task(stream()) for _ in range(NUM_OTHERS)]
    while sum(bool(trace.event_times_s) for trace in traces) < NUM_OTHERS:
        if any(task.done() for task in streams):
            break
        await asyncio.sleep(0.01)
    asked.send(None)
    with suppress(EOFError, OSError):
        while True:
            from_s, to_s = await loop.run_in_executor(None, asked.recv)
            failed = [task.exception() for task in streams if task.done()]
            asked.send(
                str(failed[0])
                if failed
                else [
                    later - sooner
                    for trace in traces
                    for sooner, later in itertools.pairwise(trace.event_times_s)
                    if from_s <= later + begin_s <= to_s
                ]
            )
    for task in streams:
        task.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
