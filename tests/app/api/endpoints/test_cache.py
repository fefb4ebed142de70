"""A reset of the prefix cache: of which models, and who may ask for it."""

from __future__ import annotations

import httpx
import pytest

from app.api.application import build_api
from app.api.http.options import ApiOptions, KeyLimits
from app.engine_client.client import EngineUnavailable
from app.text.processor import TextProcessor
from tests.app.api.hand_engine import HandEngine
from tests.app.api.test_context import made
from tests.app.api.test_errors_http import check


async def test_of_several_models_one_is_meant_or_all(
    text: TextProcessor, caplog: pytest.LogCaptureFixture
) -> None:
    contexts = made(text, a=(), b=())
    for context in contexts.values():
        context.models, context.options = contexts, ApiOptions(allowed_hosts=("localhost",))
    transport = httpx.ASGITransport(build_api(contexts["a"]))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for query, models in (("", ["a", "b"]), ("?reset_external=True&model=b", ["b"])):
            answer = await client.post(f"/reset_prefix_cache{query}")
            assert answer.json() == {"models": models}
        check(await client.post("/reset_prefix_cache?model=c"), 404, "model")
        for refused in ("reset_running_requests=true", "reset_external=false", "modle=a"):
            answer = await client.post(f"/reset_prefix_cache?{refused}")
            check(answer, 400, refused.partition("=")[0])
        check(await client.post("/reset_prefix_cache?model=a&model=b"), 400, "model")
        engines = [context.engine for context in contexts.values()]
        assert [one.num_resets for one in engines if isinstance(one, HandEngine)] == [1, 2]
        # The others are reset where one fails, and told of one by one.
        assert isinstance(engines[0], HandEngine)
        engines[0].reset_failure = RuntimeError("not in time")
        assert (await client.post("/reset_prefix_cache")).status_code == 500
    assert [one.num_resets for one in engines if isinstance(one, HandEngine)] == [1, 3]
    told = [r.getMessage() for r in caplog.records if r.name == "legato.audit"][-2:]
    assert ["settings changed" in line for line in told] == [False, True]
    assert "settings refused (not in time)" in told[0]


async def test_it_takes_an_admins_key_and_is_a_line_of_the_audit(
    text: TextProcessor, caplog: pytest.LogCaptureFixture
) -> None:
    (context,) = made(text, a=()).values()
    keys = {"secret-plain": KeyLimits(), "secret-admin": KeyLimits(admin=True)}
    context.options = ApiOptions(api_keys=keys)
    engine = context.engine
    assert isinstance(engine, HandEngine)
    transport = httpx.ASGITransport(build_api(context))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for key, status in (("secret-plain", 403), ("secret-admin", 200)):
            headers = {"authorization": f"Bearer {key}"}
            answer = await client.post("/reset_prefix_cache", headers=headers)
            assert answer.status_code == status
            assert engine.num_resets == (status == 200)
        engine.reset_failure = EngineUnavailable("the engine is being rebuilt", retry_after_s=5.0)
        answer = await client.post("/reset_prefix_cache", headers=headers)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    told = [r.getMessage() for r in caplog.records if r.name == "legato.audit"]
    assert ["settings changed" in line for line in told] == [False, True, False]
    assert "settings refused (the engine is being rebuilt)" in told[2]
