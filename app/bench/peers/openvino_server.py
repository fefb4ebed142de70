"""OpenVINO GenAI's continuous batching behind /v1/completions, for `legato bench compare`.

Takes what the benchmarks send: a prompt of token ids, greedy, as a stream; an event's text is its
token ids. Runs where openvino-genai, starlette and uvicorn are installed (README beside this file).
Usage: python openvino_server.py MODEL_FOLDER PORT [--lookup]
"""

import asyncio
import json
import queue
import sys
import threading
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import numpy as np
import openvino as ov
import uvicorn
from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, SchedulerConfig
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

NUM_DRAFTS, NGRAM = 5, 3  # of OpenVINO's own example of prompt lookup


@dataclass
class Stream:
    """One request. Its events are lists of tokens; a text is an error, None the end."""

    prompt: list[int]
    config: GenerationConfig
    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[list[int] | str | None] = field(default_factory=asyncio.Queue)

    def send(self, event: list[int] | str | None) -> None:
        self.loop.call_soon_threadsafe(self.events.put_nowait, event)


def step_forever(pipeline: ContinuousBatchingPipeline, arrivals: queue.Queue[Stream]) -> None:
    """Take what has arrived, step, hand out the new tokens; wait only where nothing runs."""
    running = []
    number = 0
    while True:
        while not running or not arrivals.empty():
            stream = arrivals.get()
            number += 1
            prompt = ov.Tensor(np.array([stream.prompt], np.int64))
            try:
                running.append((stream, pipeline.add_request(number, prompt, stream.config)))
            except RuntimeError as error:
                stream.send(str(error))
        pipeline.step()
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


def generation_config(body: dict, lookup: bool) -> GenerationConfig:
    config = GenerationConfig()
    config.max_new_tokens = body["max_tokens"]
    config.ignore_eos = body.get("ignore_eos", False)
    config.stop_token_ids = set() if config.ignore_eos else {0, 2}
    config.do_sample = False
    if lookup:
        config.num_assistant_tokens, config.max_ngram_size = NUM_DRAFTS, NGRAM
    return config


async def written(stream: Stream) -> AsyncGenerator[str]:
    num_tokens = 0
    while (event := await stream.events.get()) is not None:
        if isinstance(event, str):
            yield f"data: {json.dumps({'error': {'message': event}})}\n\n"
            return
        num_tokens += len(event)
        text = "".join(f" {token}" for token in event)
        yield f"data: {json.dumps({'choices': [{'index': 0, 'text': text}]})}\n\n"
    usage = {"prompt_tokens": len(stream.prompt), "completion_tokens": num_tokens}
    yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"


def main() -> None:
    folder, port, lookup = sys.argv[1], int(sys.argv[2]), "--lookup" in sys.argv
    scheduling = SchedulerConfig()
    scheduling.cache_size = 4
    options = {"prompt_lookup": True} if lookup else {}
    pipeline = ContinuousBatchingPipeline(folder, scheduling, "CPU", options)
    arrivals: queue.Queue[Stream] = queue.Queue()
    threading.Thread(target=step_forever, args=(pipeline, arrivals), daemon=True).start()

    async def models(_: Request) -> JSONResponse:
        return JSONResponse({"data": [{"id": "m"}]})

    async def completions(request: Request) -> StreamingResponse:
        body = await request.json()
        config = generation_config(body, lookup)
        stream = Stream(body["prompt"], config, asyncio.get_running_loop())
        arrivals.put(stream)
        return StreamingResponse(written(stream), media_type="text/event-stream")

    routes = [Route("/v1/models", models), Route("/v1/completions", completions, methods=["POST"])]
    uvicorn.run(Starlette(routes=routes), host="127.0.0.1", port=port, log_level="warning")


main()
