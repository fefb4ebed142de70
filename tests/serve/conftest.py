"""A real server in a process of its own, started by the command a user types."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.serve.live_server import DEMO, LiveServer, live_server

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    model: str
    process: subprocess.Popen[str]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _environment() -> dict[str, str]:
    """This process's environment as a user's shell has it: without what its own cluster set."""
    return {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}


@contextmanager
def running(folder: Path, args: dict[str, Any], **deployment: Any) -> Iterator[Server]:
    """`legato serve CONFIG` until the block ends, then Ctrl-C as a user would.

    A lone replica answers HTTP itself; with `deployment` (num_replicas=2, ...) HAProxy is in front.
    """
    name = "two_replicas" if deployment else "demo"
    config: dict[str, Any] = yaml.safe_load((ROOT / f"configs/serve/{name}.yaml").read_text())
    application = config["applications"][0]
    application["args"] = args if deployment else {"listen": "127.0.0.1:8000", **args}
    if deployment:
        application["deployments"] = [{"name": "LLMServer", **deployment}]
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(config))
    port = free_port()
    command = [sys.executable, "-m", "app.cli.main", "serve", str(path), "--port", str(port)]
    log = (folder / "serve.log").open("w")
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env={**_environment(), "PYTHONPATH": str(ROOT), "RAY_TMPDIR": "/tmp"},
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            if "ready in" in line:
                break
        else:
            log.flush()
            pytest.fail("the server ended:\n" + (folder / "serve.log").read_text()[-3000:])
        url = f"http://127.0.0.1:{port}"
        model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        yield Server(url, model, process)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    def start(args: dict[str, Any], **deployment: Any) -> Any:
        return running(tmp_path_factory.mktemp("serve"), args, **deployment)

    return start


@pytest.fixture(scope="package")
def demo(ray_cluster: None) -> Iterator[LiveServer]:
    """The demo model behind the API, its engine in this process: for clients that only call."""
    with live_server(DEMO, kv={"memory_gib": 0.05}) as server:
        yield server
