"""`legato serve` with a model by its name on a hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.local_hub import LocalHub, run, serving

pytestmark = pytest.mark.serve


@pytest.mark.long
def test_all_processes_of_a_fleet_use_one_download(
    serve: Callable[..., Any],
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = {path.name: path.read_bytes() for path in tiny_model("llama").iterdir()}
    with serving(LocalHub({"org/tiny": {"main": files}})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        args = {"model": {"path": "org/tiny"}, "kv": {"memory_gib": 0.01, "block_size": 4}}
        with serve(args, num_replicas=1) as server:
            assert server.model == "org/tiny"
            body = {"model": "org/tiny", "prompt": "a", "max_tokens": 2}
            assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
        assert sorted(hub.files_sent()) == sorted(files)
        assert len([path for _, path, _ in hub.requests if "/revision/" in path]) == 1


_SERVE_RUN = """
from app.ray_environment import set_environment
set_environment(haproxy=False)
from ray import serve
from app.cli.forked_workers import ForkServer
from app.cli.local_ray import start_ray
from app.main import build_app
from tests.ports import free_port
forks = ForkServer()
start_ray(2, forks)
serve.start(http_options={"host": "127.0.0.1", "port": free_port()})
args = {"model": {"path": "org/tiny"}, "kv": {"memory_gib": 0.01, "block_size": 4}}
handle = serve.run(build_app(args), name="legato")
events = list(handle.generate.options(stream=True).remote("a", max_tokens=2))
print("events", len(events))
serve.shutdown()
forks.close()
"""


@pytest.mark.long
def test_without_the_command_a_rank_downloads(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    files = {path.name: path.read_bytes() for path in tiny_model("llama").iterdir()}
    with serving(LocalHub({"org/tiny": {"main": files}})) as hub:
        ran = run(hub, tmp_path, "-c", _SERVE_RUN, RAY_TMPDIR="/tmp")
        assert "events " in ran.stdout, ran.stderr[-3000:]
        assert sorted(hub.files_sent()) == sorted(files)
        assert len([path for _, path, _ in hub.requests if "/revision/" in path]) == 1
