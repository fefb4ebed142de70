"""Requests drawn from the server's own schema, and bytes that are no HTTP: no 500, no silence."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from actors.scheduling.interfaces import Quote
from app.api.http.options import ApiOptions, KeyLimits
from app.paths import own_environment
from tests import campaign
from tests.app.api.conftest import Server, StartServer

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.timeout(300)
async def test_no_bad_request_is_answered_with_500_or_silence(
    server: Server, tmp_path: Path
) -> None:
    count, out = campaign.size(1000, 50_000), tmp_path / "fuzz.json"
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "app.cli.main", "bench", "fuzz", "--url", server.url),
        *("--requests", str(count), "--seed", "11", "--out", str(out)),
        cwd=ROOT,
        stdout=asyncio.subprocess.DEVNULL,
    )
    await client.wait()
    found = json.loads(out.read_text())
    assert found["wrong"] == []
    assert found["live"]["num_failures"] == 0
    assert sum(found["kinds"].values()) == count
    assert sum(found["accepted"].values()) < count / 5  # they are bad, most of them
    assert server.engine.num_running == 0
    answer = await server.http.post(
        "/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 2}
    )
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "arguments", [("fuzz", "--requests", "200"), ("quote", "--seconds", "1", "--lengths", "8x2")]
)
@pytest.mark.parametrize("has_key", [True, False])
async def test_a_server_with_keys_is_measured_with_one(
    start_server: StartServer, tmp_path: Path, arguments: tuple[str, ...], has_key: bool
) -> None:
    keys = {"secret": KeyLimits()}
    server = await start_server(ApiOptions(api_keys=keys), vocab_size=5000)
    server.engine.quoted = Quote(True, 0.5, 0.6, 0.04, 0.02, 0.01, None, "", None)
    out = tmp_path / "report.json"
    environment = own_environment()
    environment.pop("LEGATO_API_KEY", None)
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "app.cli.main", "bench", *arguments, "--url", server.url),
        *("--out", str(out), *(("--api-key", "secret") if has_key else ())),
        cwd=ROOT,
        env=environment,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    await client.wait()
    assert out.exists() is has_key
    if has_key:
        found = json.loads(out.read_text())
        assert not found.get("num_failed")
        # Bytes are sent as they are drawn, without a key.
        assert found.get("statuses", {}).get("401", 0) < 20
        assert "secret" not in out.read_text()
