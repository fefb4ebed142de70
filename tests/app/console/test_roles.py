"""What a key may change and ask for, how its users are counted, and what the audit log holds."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.api.application import build_api
from app.api.context import Context
from app.api.events import ApiEvents, RequestInfo
from app.api.http.options import ApiOptions, KeyLimits, at_address
from app.console.routes import console_routes
from app.engine_client.client import EngineUnavailable, ModelCard
from app.text.processor import TextProcessor
from tests.app.api.conftest import MODEL
from tests.app.api.conftest import text as text  # a fixture of this room too
from tests.app.api.hand_engine import HandEngine

ROOT = Path(__file__).resolve().parents[3]
KEYS = {
    "secret-plain": KeyLimits(),
    "secret-admin": KeyLimits(admin=True),
    "secret-low": KeyLimits(max_priority=0),
}


class Observer:
    def objectives(self) -> Mapping[str, Any]:
        return {}

    def num_streamed(self) -> int:
        return 0

    def watch_gaps(self) -> Any:
        return nullcontext([])


class Engine(HandEngine):
    changes: Mapping[str, Any] | None = None

    async def reconfigure(self, changes: Mapping[str, Any]) -> None:
        self.changes = changes

    async def subscribe_iterations(self) -> AsyncGenerator[list[Mapping[str, Any]], None]:
        yield []
        await asyncio.Event().wait()  # a feed has no end


class Sleeper(HandEngine):
    async def status(self) -> Mapping[str, Any]:
        raise EngineUnavailable("it sleeps")


def serve(
    text: TextProcessor, options: ApiOptions, prefix: str = "", events: ApiEvents | None = None
) -> tuple[Engine, httpx.AsyncClient]:
    card = ModelCard(MODEL, text.model_path, 4096, text.vocab_size, text.eos_token_ids, 1)
    engine = Engine(card)
    routes = console_routes([(MODEL, engine, Observer())], options)
    context = Context(engine, text, options, events or ApiEvents())
    transport = httpx.ASGITransport(build_api(context, routes), root_path=prefix)
    return engine, httpx.AsyncClient(transport=transport, base_url=f"http://localhost{prefix}")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_settings_are_changed_with_an_admins_key_alone(
    text: TextProcessor, caplog: pytest.LogCaptureFixture
) -> None:
    engine, client = serve(text, ApiOptions(api_keys=KEYS))
    body = {"policy": "orca"}
    for key, status in (("secret-plain", 403), ("secret-low", 403), ("secret-admin", 200)):
        assert engine.changes is None
        answer = await client.post("/console/settings", json=body, headers=bearer(key))
        assert answer.status_code == status
        if status == 403:
            assert answer.json()["error"]["code"] == "admin_only"
    assert engine.changes == body
    told = [r.getMessage() for r in caplog.records if r.name == "legato.audit"]
    assert sum("settings changed by key key-" in line for line in told) == 1
    assert "secret" not in caplog.text


async def test_those_who_may_change_nothing_do_not_flood_the_audit_log(
    text: TextProcessor, caplog: pytest.LogCaptureFixture
) -> None:
    _, client = serve(text, ApiOptions(api_keys=KEYS))
    adapters = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
    for path in ("/console/settings", *adapters, "/reset_prefix_cache"):
        for _ in range(50):
            answer = await client.post(path, json={"policy": "orca"}, headers=bearer("secret-low"))
            assert answer.status_code == 403
    told = [r.getMessage() for r in caplog.records if r.name == "legato.audit"]
    assert 1 <= len(told) < 200  # one each second
    assert told[0].startswith("refused 403 POST /console/settings from ")
    assert "key key-" in told[0]
    assert "secret" not in caplog.text


@pytest.mark.parametrize(("public", "status"), [({"/", "/live"}, 200), ({"/live"}, 401)])
async def test_the_page_s_files_need_a_key_where_the_page_does_and_its_data_always(
    text: TextProcessor, public: set[str], status: int
) -> None:
    options = ApiOptions(api_keys=KEYS, public_paths=frozenset(public))
    _, client = serve(text, options)
    page = (ROOT / "app/console/page/index.html").read_text("utf-8")
    files = {path.name for path in (ROOT / "app/console/page").iterdir()}
    loaded = set(re.findall(r'(?:src|href)="(console/[^"]+)"', page))
    assert loaded < {f"console/{name}" for name in files}
    for path in ("/", *(f"/console/{name}" for name in files)):
        for headers in ({}, bearer("wrong")):
            assert (await client.get(path, headers=headers)).status_code == status, path
        assert (await client.get(path, headers=bearer("secret-plain"))).status_code == 200, path
    for method, path in (("GET", "status"), ("GET", "feed"), ("POST", "settings"), ("GET", "x.js")):
        for headers in ({}, bearer("wrong")):
            answer = await client.request(method, f"/console/{path}", headers=headers)
            assert answer.status_code == 401, path


class Endpoints(ApiEvents):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_request_start(self, request: RequestInfo, *_: object) -> None:
        self.seen.append(request.endpoint)


async def test_below_a_prefix_of_serve_s_the_page_and_the_records_are_the_same(
    text: TextProcessor,
) -> None:
    events = Endpoints()
    _, client = serve(text, ApiOptions(api_keys=KEYS), "/chat", events)
    for file in (ROOT / "app/console/page").iterdir():
        answer = await client.get(f"/console/{file.name}")
        assert (answer.status_code, answer.content) == (200, file.read_bytes()), file
    answer = await client.get("http://localhost/chat?model=tiny")  # as Serve tells of it
    assert answer.is_redirect
    assert answer.next_request is not None
    assert str(answer.next_request.url) == "http://localhost/chat/?model=tiny"
    assert (await client.get(answer.next_request.url)).text.startswith("<!doctype html>")
    body = {"model": MODEL, "prompt": "the", "max_tokens": 1}
    answer = await client.post("/v1/completions", json=body, headers=bearer("secret-plain"))
    assert answer.status_code == 200
    assert events.seen == ["/v1/completions"]
    told = await client.get("/openapi.json", headers=bearer("secret-plain"))
    assert told.json()["servers"] == [{"url": "/chat"}]


@pytest.mark.parametrize(("host", "status"), [("127.0.0.1", 200), ("0.0.0.0", 403)])
async def test_without_keys_they_are_changed_from_this_machine_alone(
    text: TextProcessor, host: str, status: int
) -> None:
    engine, client = serve(text, at_address(ApiOptions(), host))
    answer = await client.post("/console/settings", json={"policy": "orca"})
    assert answer.status_code == status
    assert (engine.changes is not None) == (status == 200)


async def test_a_key_has_a_highest_priority(text: TextProcessor) -> None:
    _, client = serve(text, ApiOptions(api_keys=KEYS))
    for key, priority, status in (("low", 1, 403), ("low", -1, 200), ("plain", 1, 200)):
        body = {"model": MODEL, "prompt": "a", "max_tokens": 1, "priority": priority}
        headers = bearer(f"secret-{key}")
        answer = await client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == status
        if status == 403:
            assert answer.json()["error"]["param"] == "priority"


async def test_a_new_user_is_no_new_share(text: TextProcessor) -> None:
    """Gap 7: limits and fair shares go by the key; only prompts are kept apart by `user`."""
    engine, client = serve(text, ApiOptions(api_keys=KEYS))
    for user in ("ann", "bob"):
        body = {"model": MODEL, "prompt": "a", "max_tokens": 1, "user": user}
        await client.post("/v1/completions", json=body, headers=bearer("secret-plain"))
    first, second = engine.seen
    assert first.tenant == second.tenant
    assert first.cache_salt != second.cache_salt


async def test_a_model_that_the_console_does_not_know_is_told_from_those_it_does(
    text: TextProcessor,
) -> None:
    _, client = serve(text, ApiOptions())
    answer = await client.get("/console/status", params={"model": "an-adapter"})
    assert answer.status_code == 404
    message = answer.json()["error"]["message"]
    assert message == (
        f"There are no figures of a model 'an-adapter', but of {MODEL}, each with its adapters."
    )


async def test_a_model_without_a_status_does_not_hide_the_others(text: TextProcessor) -> None:
    card = ModelCard("a", text.model_path, 4096, text.vocab_size, text.eos_token_ids, 1)
    engines = [("a", Sleeper(card), Observer()), ("b", HandEngine(card), Observer())]
    routes = console_routes(engines, ApiOptions())
    transport = httpx.ASGITransport(build_api(Context(engines[0][1], text, ApiOptions()), routes))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.get("/console/status")
    told = {"ready": False, "reason": "it sleeps", "model": "a", "models": ["a", "b"]}
    assert (answer.status_code, answer.json()) == (503, told)


async def test_only_a_reader_watches_the_feed(text: TextProcessor) -> None:
    """HEAD has no body that would end."""
    _, http = serve(text, at_address(ApiOptions(), "127.0.0.1"))
    async with asyncio.timeout(20):
        answer = await http.head("/console/feed")
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-type"].startswith("text/event-stream")
