"""Files and batches through the openai package, over the hand-computable engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from actors.scheduling.interfaces import Quote
from actors.scheduling.request import Objective
from app.api.batches.limits import BatchLimits
from app.api.batches.runner import LAST
from app.api.http.options import ApiOptions, KeyLimits
from app.engine_client.client import RequestRefused
from tests.app.api.conftest import MODEL, Server, StartServer

COMPLETIONS = "/v1/completions"


@pytest.fixture
def protocol() -> str:
    return "httptools"


@pytest.fixture
async def server(start_server: StartServer) -> Server:
    return await start_server(batches=BatchLimits())


def request(name: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": name, "max_tokens": 3, **body}
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def written(*requests: Any) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in requests)


def client_of(server: Server, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key=key, max_retries=0, http_client=server.http
    )


async def begin(
    client: openai.AsyncOpenAI, content: bytes, endpoint: Any = COMPLETIONS, **more: Any
) -> Any:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more
    )


async def ended(client: openai.AsyncOpenAI, batch: Any) -> Any:
    async with asyncio.timeout(20):
        while True:
            found = await client.batches.retrieve(batch.id)
            if found.status in ("completed", "failed", "cancelled", "expired"):
                return found
            await asyncio.sleep(0.01)


async def counted(client: openai.AsyncOpenAI, batch: Any, num_completed: int) -> None:
    """Until so many of its requests are answered."""
    async with asyncio.timeout(20):
        for _ in range(2000):
            found = await client.batches.retrieve(batch.id)
            if found.request_counts.completed == num_completed:
                return
            await asyncio.sleep(0.01)


async def lines(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    content = await client.files.content(file_id)
    found = [json.loads(line) for line in content.text.splitlines()]
    by_id = {one["custom_id"]: one for one in found}
    assert len(by_id) == len(found)
    return by_id


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 (the engine has no event for it)
            await asyncio.sleep(0.005)


async def test_a_batch_answers_its_file(server: Server) -> None:
    client = server.openai
    requests = [request(f"r{n}") for n in range(40)]
    requests.append(request("wrong", top_p=7))
    batch = await begin(client, written(*requests), metadata={"of": "mine"})
    assert (batch.object, batch.status) == ("batch", "validating")
    assert batch.expires_at == batch.created_at + 86_400
    found = await ended(client, batch)
    assert found.status == "completed"
    assert found.metadata == {"of": "mine"}
    answers = (await lines(client, found.output_file_id)).values()
    used = [one["response"]["body"]["usage"] for one in answers]
    assert found.usage is not None
    assert found.usage.input_tokens == sum(one["prompt_tokens"] for one in used) > 0
    assert found.usage.total_tokens == sum(one["total_tokens"] for one in used)
    counts = found.request_counts
    assert (counts.total, counts.completed, counts.failed) == (41, 40, 1)
    assert found.in_progress_at <= found.finalizing_at <= found.completed_at
    answers = await lines(client, found.output_file_id)
    assert set(answers) == {f"r{n}" for n in range(40)}
    alone = await client.completions.create(model=MODEL, prompt="r7", max_tokens=3)
    response = answers["r7"]["response"]
    assert (response["status_code"], answers["r7"]["error"]) == (200, None)
    assert response["body"]["choices"][0]["text"] == alone.choices[0].text
    assert response["request_id"]
    errors = await lines(client, found.error_file_id)
    assert errors["wrong"]["response"]["status_code"] == 400
    assert errors["wrong"]["response"]["body"]["error"]["param"] == "top_p"


@pytest.mark.parametrize(
    ("url", "body", "key"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}, "choices"),
        ("/v1/embeddings", {"input": "Hi"}, "data"),
        ("/v1/responses", {"input": "Hi"}, "output"),
    ],
)
async def test_other_endpoints(server: Server, url: str, body: dict[str, Any], key: str) -> None:
    client = server.openai
    line = {"custom_id": "a", "method": "POST", "url": url, "body": {"model": MODEL, **body}}
    found = await ended(client, await begin(client, written(line), url))
    answer = (await lines(client, found.output_file_id))["a"]["response"]["body"]
    assert answer[key]
    assert found.error_file_id is None


@pytest.mark.parametrize("given", [{}, {"priority": None, "slo": None}])
async def test_requests_stand_behind_all_others_and_promise_nothing(
    server: Server, given: dict[str, None]
) -> None:
    client = server.openai
    await ended(client, await begin(client, written(request("a", **given))))
    (seen,) = server.engine.seen
    assert (seen.priority, seen.objective) == (LAST, Objective(tbt_s=3600.0, ttft_s=3600.0))
    assert [asked.objective for asked in server.engine.asked] == [Objective()]  # the deployment's


async def test_nothing_is_sent_without_slack_and_a_cancelled_batch_ends(server: Server) -> None:
    client = server.openai
    server.engine.quoted = Quote(False, retry_after_s=0.05)
    batch = await begin(client, written(request("a"), request("b")))
    await until(lambda: len(server.engine.asked) >= 5)
    assert (await client.batches.retrieve(batch.id)).status == "in_progress"
    assert not server.engine.seen
    with pytest.raises(openai.BadRequestError, match="cancel it first"):
        await client.files.delete(batch.input_file_id)
    assert (await client.batches.cancel(batch.id)).status == "cancelling"
    found = await ended(client, batch)
    assert (found.status, found.output_file_id, found.error_file_id) == ("cancelled", None, None)
    assert found.cancelling_at <= found.cancelled_at
    with pytest.raises(openai.BadRequestError, match="'cancelled' cannot be cancelled"):
        await client.batches.cancel(batch.id)
    assert (await client.files.delete(batch.input_file_id)).deleted


async def test_a_cancelled_batch_keeps_what_is_answered(server: Server) -> None:
    client = server.openai
    server.engine.gate = asyncio.Event()  # longer answers than one token wait for it
    requests = [request("short", max_tokens=1), request("long"), request("longer")]
    batch = await begin(client, written(*requests))
    await until(lambda: len(server.engine.seen) == 3 and server.engine.num_running == 2)
    await counted(client, batch, 1)
    await client.batches.cancel(batch.id)
    found = await ended(client, batch)
    assert found.status == "cancelled"
    assert set(await lines(client, found.output_file_id)) == {"short"}
    assert server.engine.num_running == 0


async def test_a_batch_cancelled_before_it_begins(server: Server) -> None:
    client = server.openai
    server.engine.quoted = Quote(False, retry_after_s=0.05)
    first = await begin(client, written(request("a")))
    second = await begin(client, written(request("b")))  # waits for its turn
    for batch in (second, first):
        await client.batches.cancel(batch.id)
        assert (await ended(client, batch)).status == "cancelled"
    assert not server.engine.seen


async def test_what_is_refused_for_now_comes_again(server: Server) -> None:
    client = server.openai
    server.engine.refusal = RequestRefused("later", retry_after_s=1.0)
    batch = await begin(client, written(request("a")))
    await until(lambda: bool(server.engine.seen))
    server.engine.refusal = None
    assert (await ended(client, batch)).request_counts.completed == 1


@pytest.mark.parametrize(
    ("content", "code", "param", "line"),
    [
        (b"\n", "empty_file", None, None),
        (b"\n\n{", "invalid_json_line", None, 3),
        (written(request("a"), request("a")), "duplicate_custom_id", "custom_id", 2),
        (written(request("a", "/v1/embeddings")), "invalid_url", "url", 1),
        (written(request("a", priority=1)), "invalid_value", "body.priority", 1),
        (written(request("a", slo={"tbt_ms": 5})), "invalid_value", "body.slo", 1),
        (written(request("a", prompt="x" * 3000)), "line_too_long", None, 1),
        (written(request("a", prompt=[[[]]] * 100)), "invalid_value", "body", 1),
        (written(*(request(str(n)) for n in range(6))), "too_many_requests", None, 6),
    ],
)
async def test_a_wrong_input_fails_before_anything_is_sent(
    start_server: StartServer, content: bytes, code: str, param: str | None, line: int | None
) -> None:
    server = await start_server(
        batches=BatchLimits(max_lines=5, max_line_bytes=2000, max_json_nodes=100)
    )
    found = await ended(server.openai, await begin(server.openai, content))
    assert found.status == "failed"
    problem = found.errors.data[-1]
    assert (problem.code, problem.param, problem.line) == (code, param, line)
    assert not server.engine.seen
    assert found.failed_at is not None


async def test_problems_of_an_input_are_told_up_to_a_number(server: Server) -> None:
    client = server.openai
    found = await ended(client, await begin(client, b"{\n" * 100))
    assert [problem.line for problem in found.errors.data] == list(range(1, 21))


async def test_a_key_sees_its_own_alone(start_server: StartServer) -> None:
    keys = {"ann": KeyLimits(), "bob": KeyLimits()}
    server = await start_server(ApiOptions(api_keys=keys), batches=BatchLimits())
    ann, bob = client_of(server, "ann"), client_of(server, "bob")
    batch = await ended(ann, await begin(ann, written(request("a"))))
    assert {file.purpose for file in (await ann.files.list()).data} == {"batch", "batch_output"}
    assert ((await bob.files.list()).data, (await bob.batches.list()).data) == ([], [])
    for call in (
        bob.batches.retrieve(batch.id),
        bob.batches.cancel(batch.id),
        bob.files.retrieve(batch.input_file_id),
        bob.files.content(batch.output_file_id),
        bob.files.delete(batch.output_file_id),
        bob.batches.create(
            input_file_id=batch.input_file_id, endpoint=COMPLETIONS, completion_window="24h"
        ),
    ):
        with pytest.raises(openai.NotFoundError):
            await call
    assert server.engine.seen[0].tenant.startswith("key-")


async def test_requests_of_a_batch_count_for_their_key(start_server: StartServer) -> None:
    keys = {"ann": KeyLimits(requests_per_minute=8)}
    server = await start_server(ApiOptions(api_keys=keys), batches=BatchLimits())
    batch = await begin(client_of(server, "ann"), written(*(request(str(n)) for n in range(20))))
    await until(lambda: len(server.engine.seen) == 6)  # beside the upload and the batch
    await asyncio.sleep(0.1)
    assert len(server.engine.seen) == 6
    with pytest.raises(openai.RateLimitError):
        await client_of(server, "ann").batches.retrieve(batch.id)


async def test_pages(server: Server) -> None:
    client = server.openai
    file = await client.files.create(file=("in.jsonl", b"{"), purpose="batch")
    made = [
        await client.batches.create(
            input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h"
        )
        for _ in range(5)
    ]
    newest = [batch.id for batch in reversed(made)]
    assert [batch.id async for batch in client.batches.list(limit=2)] == newest
    page = await client.batches.list(limit=2, after=newest[1])
    assert ([batch.id for batch in page.data], page.has_more) == (newest[2:4], True)
    assert [found.id for found in (await client.files.list(purpose="batch")).data] == [file.id]
    assert (await client.files.list(purpose="batch_output")).data == []
    for query, param in (("limit=0", "limit"), ("after=x", "after"), ("x=1", "x")):
        answer = await server.http.get(f"/v1/batches?{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert (await server.http.get("/v1/files?order=up")).json()["error"]["param"] == "order"


async def test_files_are_kept_as_they_came(start_server: StartServer) -> None:
    server = await start_server(batches=BatchLimits(max_file_bytes=3 << 20))
    client = server.openai
    content = bytes(range(256)) * 4 * 1024 * 3  # 3 MiB
    made = await client.files.create(file=("a.jsonl", content), purpose="batch")
    assert (made.bytes, made.filename, made.purpose) == (len(content), "a.jsonl", "batch")
    found = await client.files.retrieve(made.id)
    assert found == made
    assert (await client.files.content(made.id)).content == content
    with pytest.raises(openai.APIStatusError) as caught:
        await client.files.create(file=("a.jsonl", content + b"x"), purpose="batch")
    assert caught.value.status_code == 413
    await client.files.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        await client.files.content(made.id)


@pytest.mark.parametrize(
    ("data", "files", "param"),
    [
        ({"purpose": "fine-tune"}, {"file": ("a", b"x")}, "purpose"),
        ({}, {"file": ("a", b"x")}, "purpose"),
        ({"purpose": "batch"}, {"other": ("a", b"x")}, "other"),
        ({"purpose": "batch", "expires_after[seconds]": "3600"}, {}, "expires_after[seconds]"),
        ({"purpose": "batch", "file": "x"}, {"none": ("a", b"")}, "file"),
        ({"purpose": "batch"}, {"file": ("a", b"")}, "file"),
        ({"purpose": "b" * 2000}, {"file": ("a", b"x")}, "purpose"),
    ],
)
async def test_an_upload_is_refused_by_name(
    server: Server, data: dict[str, str], files: Any, param: str
) -> None:
    files = files or {"file": ("a", b"x")}
    answer = await server.http.post("/v1/files", data=data, files=files)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert (await server.openai.files.list()).data == []
    plain = await server.http.post("/v1/files", content=b"x")
    assert plain.status_code == 415


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"completion_window": "1h"}, "completion_window"),
        ({"endpoint": "/v1/messages"}, "endpoint"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"output_expires_after": {"seconds": 3600}}, "output_expires_after"),
    ],
)
async def test_a_batch_is_refused_by_name(server: Server, change: Any, param: str) -> None:
    file = await server.openai.files.create(file=("a", b"x"), purpose="batch")
    body = {"input_file_id": file.id, "endpoint": COMPLETIONS, "completion_window": "24h"}
    answer = await server.http.post("/v1/batches", json={**body, **change})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_what_a_key_may_keep_is_bounded(start_server: StartServer) -> None:
    limits = BatchLimits(max_file_bytes=600, max_bytes=1000, max_files=4, max_batches=2)
    server = await start_server(batches=limits)
    client = server.openai
    file = await client.files.create(file=("a", written(request("a"))), purpose="batch")
    asked = {"input_file_id": file.id, "endpoint": COMPLETIONS, "completion_window": "24h"}
    server.engine.quoted = Quote(False, retry_after_s=0.05)
    first = await client.batches.create(**asked)
    with pytest.raises(openai.BadRequestError, match="max_files_per_key"):
        await client.batches.create(**asked)
    server.engine.quoted = Quote(True)
    assert (await ended(client, first)).status == "completed"
    with pytest.raises(openai.BadRequestError, match="max_gib_per_key"):
        await client.files.create(file=("b", b"x" * 600), purpose="batch")
    for _ in range(2):
        await client.files.create(file=("c", b"x"), purpose="batch")
    with pytest.raises(openai.BadRequestError, match="max_files_per_key"):
        await client.files.create(file=("d", b"x"), purpose="batch")


async def test_an_answer_without_room_is_an_error(start_server: StartServer) -> None:
    content = written(*(request(str(n)) for n in range(9)))
    server = await start_server(batches=BatchLimits(max_bytes=len(content) + 1000))
    found = await ended(server.openai, await begin(server.openai, content))
    assert (found.status, found.request_counts.total) == ("completed", 9)
    errors = await lines(server.openai, found.error_file_id)
    assert {one["error"]["code"] for one in errors.values()} == {"storage_limit_exceeded"}
    assert found.request_counts.failed == len(errors) < 9


async def test_the_oldest_batch_that_has_ended_is_forgotten(start_server: StartServer) -> None:
    server = await start_server(batches=BatchLimits(max_batches=2))
    client = server.openai
    made = [await ended(client, await begin(client, b"{")) for _ in range(3)]
    assert [batch.id for batch in (await client.batches.list()).data] == [made[2].id, made[1].id]
    server.engine.quoted = Quote(False, retry_after_s=0.05)
    for _ in range(2):
        await begin(client, written(request("a")))
    with pytest.raises(openai.BadRequestError, match="max_batches_per_key"):
        await begin(client, written(request("a")))


async def test_a_server_without_batches_says_so(start_server: StartServer) -> None:
    server = await start_server()
    for call in (server.openai.files.list(), server.openai.batches.list()):
        with pytest.raises(openai.BadRequestError, match="setting `batches`"):
            await call
