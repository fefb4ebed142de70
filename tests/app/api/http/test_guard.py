"""Keys, origins, limits and ids: what every request meets first."""

from __future__ import annotations

import asyncio
import pickle
from collections import Counter
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from starlette.responses import Response

from app.api.application import build_api
from app.api.context import Context
from app.api.http.audit import Audit
from app.api.http.errors import ApiError
from app.api.http.guard import Guard, Ingress, middlewares
from app.api.http.keys import (
    ApiKeyError,
    KeyRing,
    TokenBucket,
    by_digest,
    given_key,
    read_key,
    shown_key,
)
from app.api.http.options import ApiOptions, KeyLimits, at_address
from app.engine_client.client import EngineUnavailable, ModelCard, RequestRefused
from app.settings.load import parse
from app.settings.model_folder import SettingsError
from app.text.processor import TextProcessor
from tests.app.api.conftest import MODEL, Server, StartServer
from tests.app.api.hand_engine import HandEngine

PROTOCOLS = ["uvicorn", "own"]
KEY = {"authorization": "Bearer sesame"}
BODY = {"model": MODEL, "prompt": "a", "max_tokens": 2}


async def test_keys_guard_every_route(start_server: StartServer) -> None:
    server = await start_server(ApiOptions(api_keys={"sesame": KeyLimits()}))
    document = (await server.http.get("/openapi.json", headers=KEY)).json()
    for path, operations in document["paths"].items():
        for method in operations:
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "sesame"}):
                answer = await server.http.request(method, path, headers=headers)
                public = path in ("/health", "/live")
                assert answer.status_code == (200 if public else 401), path
    assert (await server.http.get("/nowhere")).status_code == 401
    assert (await server.http.post("/v1/completions", json=BODY, headers=KEY)).status_code == 200
    assert server.engine.seen[-1].tenant.startswith("key-")
    assert "sesame" not in server.engine.seen[-1].tenant


async def test_a_key_may_come_as_anthropic_s_clients_send_it(start_server: StartServer) -> None:
    server = await start_server(ApiOptions(api_keys={"sesame": KeyLimits()}))
    for headers, status in (({"x-api-key": "sesame"}, 200), ({"x-api-key": "open"}, 401)):
        answer = await server.http.get("/v1/models", headers=headers)
        assert answer.status_code == status
    assert "x-api-key" in answer.json()["error"]["message"]
    both = {"x-api-key": "sesame", "authorization": "Bearer open"}
    assert (await server.http.get("/v1/models", headers=both)).status_code == 401


async def test_request_limit_of_a_key(start_server: StartServer) -> None:
    server = await start_server(ApiOptions(api_keys={"sesame": KeyLimits(requests_per_minute=2)}))
    statuses = []
    for _ in range(3):
        answer = await server.http.post("/v1/completions", json=BODY, headers=KEY)
        statuses.append(answer.status_code)
    assert statuses == [200, 200, 429]
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["code"] == "rate_limit_exceeded"


async def test_token_limit_of_a_key_counts_prompt_and_answer(start_server: StartServer) -> None:
    server = await start_server(ApiOptions(api_keys={"sesame": KeyLimits(tokens_per_minute=20)}))
    body = {"model": MODEL, "prompt": "a" * 10, "max_tokens": 9}
    first = await server.http.post("/v1/completions", json=body, headers=KEY)
    second = await server.http.post("/v1/completions", json=body, headers=KEY)
    assert (first.status_code, second.status_code) == (200, 429)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RequestRefused("full", retry_after_s=1.0), 429),
        (EngineUnavailable("loading", retry_after_s=1.0), 503),
        (RequestRefused("no step is that short", param="slo.tbt_ms"), 400),
    ],
)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a" * 30, "max_tokens": 1}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a" * 30}], "max_tokens": 1},
        ),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a" * 30}], "max_tokens": 1}),
    ],
)
async def test_a_prompt_that_is_refused_for_now_costs_its_key_no_tokens(
    start_server: StartServer,
    path: str,
    body: dict[str, Any],
    error: Exception,
    status: int,
    stream: bool,
) -> None:
    server = await start_server(ApiOptions(api_keys={"sesame": KeyLimits(tokens_per_minute=50)}))
    statuses = []
    for refusal in (error, error, error, None, None):
        server.engine.refusal = refusal
        asked = {"model": MODEL, "stream": stream, **body}
        statuses.append((await server.http.post(path, json=asked, headers=KEY)).status_code)
    assert statuses == [status] * 3 + [200, 429]
    assert len(server.engine.seen) == 4


def test_bucket_fills_with_time_and_remembers_debt() -> None:
    now = [0.0]
    bucket = TokenBucket(60.0, lambda: now[0])
    bucket.charge(90.0)
    assert bucket.wait_s(1.0) == pytest.approx(31.0)
    now[0] = 31.0
    assert bucket.wait_s(1.0) == 0.0
    now[0] = 1000.0
    assert bucket.wait_s(10_000.0) == 0.0  # more than the bucket holds: a full one will do


def test_keys_that_would_share_what_is_theirs_are_refused() -> None:
    """Files, batches and cached prefixes belong to a key by the beginning of its digest."""
    with pytest.raises(ApiKeyError, match=r"key-[0-9a-f]{8}: another key is called key-"):
        KeyRing({"sk-3334": KeyLimits(), "sk-121845": KeyLimits()})
    KeyRing({"sk-3334": KeyLimits(), f"sha256:{sha256(b'sk-3334').hexdigest()}": KeyLimits()})


def test_key_ring_compares_whole_keys() -> None:
    ring = KeyRing({"sesame": KeyLimits(), "open": KeyLimits()})
    first, second = ring.admit(b"Bearer sesame"), ring.admit(b"bearer open")
    assert first is not None
    assert second is not None
    assert first.name != second.name
    for wrong in (None, b"", b"Bearer", b"Bearer ses", b"Basic sesame", b"Bearer sesame2"):
        with pytest.raises(ApiError) as caught:
            ring.admit(wrong)
        assert caught.value.status == 401


def test_an_empty_key_admits_nobody_and_spaces_around_one_do_not_count() -> None:
    for empty in ("", "  "):
        with pytest.raises(SettingsError, match=r"^api: api_keys: one is empty"):
            parse({"model": {"path": "none"}, "api": {"api_keys": {empty: {"admin": True}}}})
        with pytest.raises(ApiKeyError, match=r"^api\.api_keys: .*: it holds no key"):
            read_key(empty)
    ring = KeyRing({" sesame ": KeyLimits(admin=True)})
    assert ring.admit(b"Bearer sesame").is_admin
    for_proxy = {b"authorization": b"Basic dTpw", b"x-api-key": b"sesame"}
    assert ring.admit(given_key(for_proxy)).is_admin
    for header in ({b"authorization": b"Bearer "}, {b"x-api-key": b""}):
        with pytest.raises(ApiError):
            ring.admit(given_key(header))


def test_a_reference_with_spaces_around_it_is_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEGATO_TEST_KEY", "sesame")
    assert read_key(" env:LEGATO_TEST_KEY ") == "sesame"
    assert shown_key(" env:LEGATO_TEST_KEY ") == "env:LEGATO_TEST_KEY"


def test_a_digest_in_the_settings_stands_for_its_key() -> None:
    written = by_digest(" sesame ")
    assert written == f"sha256:{sha256(b'sesame').hexdigest()}"
    assert by_digest(written) == written
    assert by_digest("env:NAME") == "env:NAME"
    assert shown_key(written) == shown_key("sesame")
    ring, plain = KeyRing({written: KeyLimits()}), KeyRing({"sesame": KeyLimits()})
    assert ring.admit(b"Bearer sesame").name == plain.admit(b"Bearer sesame").name
    with pytest.raises(ApiError):
        ring.admit(b"Bearer " + written.encode())
    for wrong in ("sha256:", "sha256:12", f"{written}0", "sha256:" + 64 * "g"):
        with pytest.raises(ApiKeyError, match="64 hexadecimal digits"):
            KeyRing({wrong: KeyLimits()})


async def test_public_paths_and_probes_are_those_below_a_prefix() -> None:
    options = ApiOptions(api_keys={"sesame": KeyLimits()}, allowed_hosts=("here",))
    guard = Guard(Response("fine"), options, KeyRing(options.api_keys), Audit(), Counter())
    transport = httpx.ASGITransport(guard, root_path="/chat")
    async with httpx.AsyncClient(transport=transport, base_url="http://here/chat") as client:
        for path, host, status in (
            ("/health", "here", 200),
            ("/health", "10.0.0.7", 200),
            ("/v1/models", "here", 401),
            ("/v1/health", "here", 401),
            ("/", "elsewhere", 403),
        ):
            answer = await client.get(path, headers={"host": host})
            assert answer.status_code == status, path
    adapted = Ingress(Response("fine"), adapted={"/v1/messages": Response("adapted")})
    transport = httpx.ASGITransport(adapted, root_path="/chat")
    async with httpx.AsyncClient(transport=transport, base_url="http://here/chat") as client:
        for path, text in (("/v1/messages/count_tokens", "adapted"), ("/v1/models", "fine")):
            assert (await client.get(path)).text == text


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://evil.example", 403),
        ("null", 403),
        ("http://[", 403),
        ("http://localhost:1", 403),
        ("OWN", 200),
        ("http://friend.example", 200),
    ],
)
async def test_foreign_origins(start_server: StartServer, origin: str, status: int) -> None:
    server = await start_server(ApiOptions(allowed_origins=("http://friend.example",)))
    headers = {"origin": server.url if origin == "OWN" else origin}
    answer = await server.http.post("/v1/completions", json=BODY, headers=headers)
    assert answer.status_code == status
    allowed = answer.headers.get("access-control-allow-origin")
    assert allowed == (headers["origin"] if status == 200 else None)
    assert answer.headers["vary"] == "Origin"  # of refusals too: a cache must not mix them up


async def preflight(server: Server, origin: str) -> httpx.Response:
    """What a browser asks before a page of that origin may send a key and JSON."""
    asked = "authorization,content-type,x-stainless-os"
    headers = {"access-control-request-method": "POST", "access-control-request-headers": asked}
    return await server.http.options("/v1/completions", headers={"origin": origin, **headers})


@pytest.mark.parametrize("keys", [{}, {"sesame": KeyLimits()}])
async def test_preflights_are_answered_for_allowed_origins_alone(
    start_server: StartServer, keys: dict[str, KeyLimits]
) -> None:
    options = ApiOptions(allowed_origins=("http://friend.example",), api_keys=keys)
    server = await start_server(options)
    for origin in ("http://friend.example", server.url):
        answer = await preflight(server, origin)
        assert (answer.status_code, answer.content) == (204, b"")
        assert answer.headers["access-control-allow-origin"] == origin
        assert "POST" in answer.headers["access-control-allow-methods"]
        allowed = answer.headers["access-control-allow-headers"].split(",")
        assert {"authorization", "content-type", "x-stainless-os"} <= set(allowed)
        assert answer.headers.get_list("vary", split_commas=True) == [
            "Access-Control-Request-Headers",
            "Origin",
        ]
    refused = await preflight(server, "http://evil.example")
    assert refused.status_code == 403
    assert "access-control-allow-origin" not in refused.headers
    assert "allowed_origins" in refused.json()["error"]["message"]


async def test_every_origin_may_be_allowed(start_server: StartServer) -> None:
    server = await start_server(ApiOptions(allowed_origins=("*",)))
    asked = await preflight(server, "http://any.example")
    answer = await server.http.post(
        "/v1/completions", json=BODY, headers={"origin": "http://any.example"}
    )
    assert (asked.status_code, answer.status_code) == (204, 200)
    assert asked.headers["access-control-allow-origin"] == "*"
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "vary" not in answer.headers
    readable = answer.headers["access-control-expose-headers"].split(", ")
    assert readable == [
        "request-id",
        "retry-after",
        "x-request-id",
    ]  # Anthropic's name and OpenAI's


async def test_cors_is_off_by_default(server: Server) -> None:
    answer = await server.http.get("/v1/models", headers={"origin": "http://evil.example"})
    assert "access-control-allow-origin" not in answer.headers
    assert (await preflight(server, "http://evil.example")).status_code == 403


@pytest.mark.parametrize("origin", ["friend.example", "http://friend.example/", "null", ""])
def test_what_no_browser_sends_is_no_allowed_origin(origin: str) -> None:
    with pytest.raises(SettingsError, match=r"allowed_origins: .* is not an origin"):
        parse({"model": {"path": "configs/models/demo"}, "api": {"allowed_origins": [origin]}})


async def test_allowed_hosts(start_server: StartServer) -> None:
    server = await start_server(ApiOptions(allowed_hosts=("127.0.0.1",)))
    assert (await server.http.get("/v1/models")).status_code == 200
    for host in ("evil.example", "["):
        rebound = await server.http.get("/v1/models", headers={"host": host})
        assert rebound.status_code == 403


async def test_probes_come_by_any_address(start_server: StartServer) -> None:
    """Those of `legato serve`, of Kubernetes and of load balancers; they hold no data."""
    server = await start_server(ApiOptions(allowed_hosts=("api.example",)))
    for path, status in (("/health", 200), ("/live", 200), ("/v1/models", 403)):
        assert (await server.http.get(path, headers={"host": "10.0.0.7"})).status_code == status


async def test_a_loopback_server_behind_a_proxy_serves_its_name_too(
    start_server: StartServer,
) -> None:
    options = at_address(ApiOptions(allowed_hosts=("api.example",)), "127.0.0.1")
    assert not options.is_local
    server = await start_server(options)
    for host, status in (("api.example", 200), ("127.0.0.1", 200), ("evil.example", 403)):
        answer = await server.http.get("/v1/models", headers={"host": host})
        assert answer.status_code == status


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("allowed_hosts", "api.example:8000", "is not a host"),
        ("allowed_hosts", "https://api.example", "is not a host"),
        ("allowed_hosts", "[::1]", "is not a host"),
        ("public_paths", "health", "write /health"),
    ],
)
def test_what_no_request_could_match_is_refused(setting: str, value: str, said: str) -> None:
    with pytest.raises(SettingsError, match=f"{setting}: .*{said}"):
        parse({"model": {"path": "configs/models/demo"}, "api": {setting: [value]}})
    ApiOptions(allowed_hosts=("*", "api.example", "10.0.0.7", "::1"))


async def test_a_loopback_server_serves_no_foreign_name(start_server: StartServer) -> None:
    """A page whose own name was given this machine's address is kept out; no other is."""
    server = await start_server(at_address(ApiOptions(), "127.0.0.1"))
    port = server.port
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", "LOCALHOST", f"[::1]:{port}"):
        assert (await server.http.get("/v1/models", headers={"host": host})).status_code == 200
    for host in (f"evil.example:{port}", "127.0.0.1.evil.example", ""):
        answer = await server.http.get("/v1/models", headers={"host": host})
        assert answer.status_code == 403
        assert "allowed_hosts" in answer.json()["error"]["message"]
    assert at_address(ApiOptions(), "0.0.0.0").allowed_hosts == ()


@pytest.mark.parametrize(
    ("line", "status"),
    [("HTTP/1.0", 200), ("HTTP/1.0\r\nHost: evil.example", 403), ("HTTP/1.1", 400)],
)
async def test_only_http_1_0_may_lack_a_host(
    start_server: StartServer, line: str, status: int
) -> None:
    """Health checkers that speak it send none; browsers, which could be rebound, always do."""
    server = await start_server(at_address(ApiOptions(), "127.0.0.1"))
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(f"GET /v1/models {line}\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    writer.close()


async def test_keys_from_the_environment_and_from_files(
    start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEGATO_TEST_KEY", "sesame\n")  # as of a Kubernetes Secret made with echo
    (tmp_path / "key").write_text("simsim\n")
    written = {"env:LEGATO_TEST_KEY": KeyLimits(), f"file:{tmp_path}/key": KeyLimits()}
    server = await start_server(ApiOptions(api_keys=written))
    for key, status in (("sesame", 200), ("simsim", 200), ("env:LEGATO_TEST_KEY", 401)):
        headers = {"authorization": f"Bearer {key}"}
        assert (await server.http.get("/v1/models", headers=headers)).status_code == status
    (tmp_path / "empty").write_text("\n")
    for missing in ("env:LEGATO_NO_SUCH_KEY", "file:/no/such/file", f"file:{tmp_path}/empty"):
        with pytest.raises(ValueError, match=missing):
            KeyRing({missing: KeyLimits()})


async def test_limits_and_shares_go_by_the_key_whatever_user_is_named(
    start_server: StartServer,
) -> None:
    """Cached prefixes are kept apart all the same."""
    server = await start_server(ApiOptions(api_keys={"sesame": KeyLimits()}))
    for user in ("alice", "bob"):
        body = {**BODY, "user": user}
        assert (await server.http.post("/v1/completions", json=body, headers=KEY)).is_success
    first, second = server.engine.seen
    assert first.tenant == second.tenant
    assert first.cache_salt != second.cache_salt


async def test_a_key_asks_for_no_more_than_its_priority(start_server: StartServer) -> None:
    server = await start_server(ApiOptions(api_keys={"sesame": KeyLimits(max_priority=0)}))
    for priority, status in ((-5, 200), (0, 200), (1, 403)):
        body = {**BODY, "priority": priority}
        answer = await server.http.post("/v1/completions", json=body, headers=KEY)
        assert answer.status_code == status
    assert answer.json()["error"]["param"] == "priority"


async def test_refusals_are_told_of_without_keys_and_once_a_second(
    start_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    server = await start_server(ApiOptions(api_keys={"sesame": KeyLimits()}))
    for _ in range(50):
        await server.http.get("/v1/mo%0Adels", headers={"authorization": "Bearer open"})
    lines = [r.getMessage() for r in caplog.records if r.name == "legato.audit"]
    assert 1 <= len(lines) < 10
    assert lines[0].startswith("refused 401 GET /v1/mo?dels from 127.0.0.1")
    assert not any("open" in line for line in lines)


async def test_every_answer_with_an_error_is_counted_once(text: TextProcessor) -> None:
    limits = KeyLimits(requests_per_minute=4)
    options = ApiOptions(api_keys={"sesame": limits}, max_concurrent_requests=1)
    card = ModelCard(MODEL, text.model_path, 4096, text.vocab_size, text.eos_token_ids, 1)
    context = Context(HandEngine(card), text, options)
    transport = httpx.ASGITransport(build_api(context))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for body, headers, status in (
            (BODY, {}, 401),
            (BODY, KEY, 200),
            ({**BODY, "prompt": ""}, KEY, 400),
        ):
            answer = await client.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == status
        assert (await client.get("/nowhere", headers=KEY)).status_code == 404
        context.running.num_requests = 1
        for code in ("overloaded", "rate_limit_exceeded"):
            answer = await client.post("/v1/completions", json=BODY, headers=KEY)
            assert answer.json()["error"]["code"] == code
    assert context.running.errors == {
        (401, "invalid_api_key"): 1,
        (400, "empty_prompt"): 1,
        (404, "not_found_error"): 1,
        (429, "overloaded"): 1,
        (429, "rate_limit_exceeded"): 1,
    }


async def test_request_ids_come_back(server: Server) -> None:
    given = await server.http.get("/live", headers={"x-request-id": "my-id.7"})
    assert given.headers["x-request-id"] == "my-id.7"
    odd = await server.http.get("/live", headers={"x-request-id": "a b"})
    assert odd.headers["x-request-id"] != "a b"
    assert (await server.http.get("/nowhere")).headers["x-request-id"]


async def test_headers_are_limited(server: Server) -> None:
    many = {f"x-{i}": "1" for i in range(120)}
    assert (await server.http.get("/live", headers=many)).status_code == 431
    assert (await server.http.get("/live", headers={"x": "y" * 33_000})).status_code == 431


async def test_bodies_are_limited_with_and_without_length(start_server: StartServer) -> None:
    server = await start_server(ApiOptions(max_body_bytes=1000))
    body = b'{"prompt": "' + b"a" * 2000 + b'"}'
    headers = {"content-type": "application/json"}
    declared = await server.http.post("/v1/completions", content=body, headers=headers)
    assert declared.status_code == 413

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    streamed = await server.http.post("/v1/completions", content=chunks(), headers=headers)
    assert streamed.status_code == 413
    assert streamed.json()["error"]["type"] == "invalid_request_error"
    for answer in (declared, streamed):
        assert "api.max_body_bytes" in answer.json()["error"]["message"]


async def test_a_body_that_never_comes_is_given_up(start_server: StartServer) -> None:
    server = await start_server(ApiOptions(body_timeout_s=0.05))
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: 100\r\n\r\n{"
    )
    head = await reader.readuntil(b"\r\n\r\n")
    assert b" 408 " in head
    writer.close()


async def test_too_many_at_once_are_refused(start_server: StartServer) -> None:
    server = await start_server(ApiOptions(max_concurrent_requests=1))
    server.engine.gate = asyncio.Event()
    async with server.http.stream(
        "POST", "/v1/completions", json={**BODY, "stream": True}
    ) as first:
        assert first.status_code == 200
        second = await server.http.post("/v1/completions", json=BODY)
        assert second.status_code == 429
        assert second.headers["retry-after"]
        server.engine.gate.set()
        await first.aread()
    third = await server.http.post("/v1/completions", json=BODY)
    assert third.status_code == 200


async def test_a_proxy_of_serve_can_pickle_the_scope_that_the_middleware_gives_it() -> None:
    """Without the connection, which the replica behind it looks for anew."""
    (middleware,) = middlewares()
    seen = list[Any]()

    class Cycle:
        transport = SimpleNamespace(get_extra_info=lambda name: None)  # like a server's: no pickle

        async def send(self, message: Any) -> None: ...

    async def proxy(scope: Any, receive: Any, send: Any) -> None:
        seen.append(pickle.loads(pickle.dumps(scope)))
        assert scope["legato.transport"].transport is Cycle.transport

    scope = {"type": "http", "path": "/", "headers": [(b"x-request-timeout-seconds", b"1")]}
    await cast(Any, middleware).cls(proxy)(scope, None, Cycle().send)
    assert seen == [{"type": "http", "path": "/", "headers": [], "legato.transport": None}]
