"""OpenVINO GenAI's continuous batching behind /v1/completions, for `legato bench compare`.

Takes what the benchmarks send: a prompt of token ids, greedy, as a stream; an event's text is its
token ids. Runs where openvino-genai, starlette and uvicorn are installed (README beside this file).
Usage: python openvino_server.py MODEL_FOLDER PORT [--lookup]
"""

from __future__ import annotations

import asyncio
import json
import queue
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

NUM_DRAFTS, NGRAM = 5, 3  # as in OpenVINO's own example of prompt lookup
CACHE_GB = 4


@dataclass
class Stream:
    """One request. Its events are new tokens; a text is an error, None the end."""

    body: Mapping[str, Any]
    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[list[int] | str | None] = field(default_factory=asyncio.Queue)

    def send(self, event: list[int] | str | None) -> None:
        self.loop.call_soon_threadsafe(self.events.put_nowait, event)


def step_forever(
    pipeline: Any, arrivals: queue.Queue[Stream | None], add: Callable[[int, Stream], Any]
) -> None:
    """Take what has arrived, step, hand out the new tokens; wait only where nothing runs.

    add: hands a request with its number to the pipeline. An arrival of None ends the loop.
    """
    running = list[tuple[Stream, Any]]()
    number = 0
    while True:
        while not running or not arrivals.empty():
            stream = arrivals.get()
            if stream is None:
                return
            number += 1
            try:
                running.append((stream, add(number, stream)))
            except RuntimeError as error:
                stream.send(str(error))
        try:
            pipeline.step()
        except RuntimeError as error:  # no client may wait for what will not come
            for stream, _ in running:
                stream.send(str(error))
            running = []
            continue
        still = []
        for stream, handle in running:
            while handle.can_read():
                for output in handle.read().values():
                    stream.send(list(output.generated_ids))
            if handle.get_status().name == "RUNNING":
                still.append((stream, handle))
            else:
                stream.send(None)
        running = still


async def sse(stream: Stream) -> AsyncGenerator[str]:
    num_tokens = 0
    while (event := await stream.events.get()) is not None:
        if isinstance(event, str):
            yield f"data: {json.dumps({'error': {'message': event}})}\n\n"
            return
        num_tokens += len(event)
        text = "".join(f" {token}" for token in event)
        yield f"data: {json.dumps({'choices': [{'index': 0, 'text': text}]})}\n\n"
    usage = {"prompt_tokens": len(stream.body["prompt"]), "completion_tokens": num_tokens}
    yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"


def application(arrivals: queue.Queue[Stream | None]) -> Starlette:
    async def models(_: Request) -> JSONResponse:
        return JSONResponse({"data": [{"id": "m"}]})

    async def completions(request: Request) -> StreamingResponse:
        stream = Stream(await request.json(), asyncio.get_running_loop())
        arrivals.put(stream)
        return StreamingResponse(sse(stream), media_type="text/event-stream")

    routes = [Route("/v1/models", models), Route("/v1/completions", completions, methods=["POST"])]
    return Starlette(routes=routes)


def main() -> None:
    import numpy as np
    import openvino as ov
    from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, SchedulerConfig

    folder, port, lookup = sys.argv[1], int(sys.argv[2]), "--lookup" in sys.argv
    scheduling = SchedulerConfig()
    scheduling.cache_size = CACHE_GB
    options = {"prompt_lookup": True} if lookup else {}
    pipeline = ContinuousBatchingPipeline(folder, scheduling, "CPU", options)

    def add(number: int, stream: Stream) -> Any:
        config = GenerationConfig()
        config.max_new_tokens = stream.body["max_tokens"]
        config.ignore_eos = stream.body.get("ignore_eos", False)
        config.do_sample = False
        if lookup:
            config.num_assistant_tokens, config.max_ngram_size = NUM_DRAFTS, NGRAM
        prompt = ov.Tensor(np.array([stream.body["prompt"]], np.int64))
        return pipeline.add_request(number, prompt, config)

    arrivals: queue.Queue[Stream | None] = queue.Queue()
    threading.Thread(target=step_forever, args=(pipeline, arrivals, add), daemon=True).start()
    uvicorn.run(application(arrivals), host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main()
