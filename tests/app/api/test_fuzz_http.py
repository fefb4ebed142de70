"""Requests drawn from the server's own schema, and bytes that are no HTTP: no 500, no silence."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from tests import campaign
from tests.app.api.conftest import Server

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.timeout(300)
async def test_no_bad_request_is_answered_with_500_or_silence(
    server: Server, tmp_path: Path
) -> None:
    count, out = campaign.size(2000, 50_000), tmp_path / "fuzz.json"
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
