"""Batches with a clock that is set, and a server that answers when it is told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.api.batches.batch import Batch, BatchStatus
from app.api.batches.files import UPLOADED, FileStore
from app.api.batches.jobs import Batches
from app.api.batches.limits import BatchLimits
from app.api.batches.runner import QUOTE, Reply

ENDPOINT = "/v1/completions"


class HandServer:
    """Answers a request with its own prompt, once `go_on` is set."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.seen: list[str] = []
        self.num_running = self.most_running = 0

    async def post(self, url: str, body: bytes) -> Reply:
        content = json.loads(body)
        if url == QUOTE:
            tokens = {"prompt_tokens": 1, "retry_after_s": None}
            return Reply(200, json.dumps({**tokens, "can_serve_now": True}).encode())
        self.seen.append(content["prompt"])
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await self.go_on.wait()
        finally:
            self.num_running -= 1
        return Reply(200, json.dumps({"prompt": content["prompt"]}).encode(), "request-id")


class Shop:
    """Batches in a folder, at a time that a test sets."""

    def __init__(self, folder: Path, **limits: Any) -> None:
        self.now_s = 1_000_000.0
        store = FileStore(folder, BatchLimits(**limits), clock=lambda: self.now_s)
        self.batches = Batches(store, clock=lambda: self.now_s)
        self.server = HandServer()

    async def begin(self, *prompts: str, owner: str = "") -> Batch:
        new = self.batches.files.begin(owner)
        for prompt in prompts:
            line = {"custom_id": prompt, "url": ENDPOINT, "body": {"prompt": prompt}}
            await new.write(json.dumps(line).encode() + b"\n")
        file = new.keep("in.jsonl", UPLOADED)
        return self.batches.create(owner, file.id, ENDPOINT, "24h", None, self.server)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 (nothing tells of it)
            await asyncio.sleep(0.002)


def names(batch: Batch) -> tuple[set[str], set[str]]:
    """Whose answers are in the output, and in the errors."""
    files = (batch.output, batch.errors)
    texts = ["" if file is None else file.path.read_text() for file in files]
    output, errors = ({json.loads(x)["custom_id"] for x in text.splitlines()} for text in texts)
    return output, errors


def lose_answers(folder: Path) -> None:
    """Remove the files that hold nothing yet, which then cannot be kept under their names."""
    for file in folder.glob("server-*/file-*"):
        if not file.stat().st_size:
            file.unlink()


def left(folder: Path) -> list[Path]:
    return list(folder.glob("server-*"))


async def test_what_is_not_answered_within_the_window_has_expired(tmp_path: Path) -> None:
    shop = Shop(tmp_path, max_requests=1)
    first = await shop.begin("a", "b")
    second = await shop.begin("c")
    await until(lambda: shop.server.seen == ["a"])
    await until(lambda: second.status is BatchStatus.IN_PROGRESS)  # it waits for the first
    shop.now_s += 86_400
    shop.server.go_on.set()
    await until(lambda: second.is_finished)
    assert (first.status, second.status) == (BatchStatus.COMPLETED, BatchStatus.EXPIRED)
    assert names(first) == ({"a", "b"}, set())
    assert names(second) == (set(), {"c"})
    assert second.errors is not None
    (line,) = second.errors.path.read_text().splitlines()
    assert json.loads(line)["error"]["code"] == "batch_expired"
    assert second.shown()["expired_at"] == 1_086_400
    await shop.batches.close()


async def test_keys_share_the_requests_under_way(tmp_path: Path) -> None:
    shop = Shop(tmp_path, max_requests=4)
    ann = [await shop.begin(*(f"a{n}-{k}" for n in range(200)), owner="ann") for k in range(2)]
    bob = await shop.begin(*(f"b{n}" for n in range(6)), owner="bob")
    await until(lambda: shop.server.num_running == 4)
    await until(lambda: bob.status is BatchStatus.IN_PROGRESS)
    shop.server.go_on.set()
    await until(lambda: all(batch.is_finished for batch in (*ann, bob)))
    assert shop.server.most_running == 4
    seen = shop.server.seen
    batch_of = [name[-1] for name in seen if name[0] == "a"]
    assert batch_of == sorted(batch_of)  # one batch of a key after another
    assert seen.index("b5") < seen.index("a0-1")  # neither key waits for all of the other's
    await shop.batches.close()


async def test_a_disk_that_fails_ends_a_batch_and_no_other(tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    batch = await shop.begin("a")
    await until(lambda: shop.server.seen == ["a"])
    lose_answers(tmp_path)
    shop.server.go_on.set()
    await until(lambda: batch.is_finished)
    assert batch.status is BatchStatus.FAILED
    assert batch.shown()["errors"]["data"][0]["code"] == "server_error"
    other = await shop.begin("b")
    await until(lambda: other.is_finished)
    assert names(other) == ({"b"}, set())
    assert shop.batches.files.num_files("") == 3  # two inputs, one output
    await shop.batches.close()


async def test_the_end_of_the_server_is_the_end_of_all(tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    batches = [await shop.begin("a"), await shop.begin("b"), await shop.begin("c", owner="bob")]
    await until(lambda: len(shop.server.seen) == 2)
    await asyncio.wait_for(shop.batches.close(), 5)
    assert {batch.status for batch in batches} == {BatchStatus.CANCELLED}
    assert shop.server.num_running == 0
    assert not left(tmp_path)


async def test_checking_a_long_input_leaves_the_loop_to_others(tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    shop.server.go_on.set()
    batch = await shop.begin(*(f"prompt {n}" for n in range(2000)))
    turns = 0
    while batch.status is BatchStatus.VALIDATING:
        await asyncio.sleep(0)
        turns += 1
    assert turns > 5
    await until(lambda: batch.is_finished)
    assert batch.num_completed == batch.num_requests == 2000
    await shop.batches.close()
