"""A real server in a process of its own, started by the command a user types."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Server:
    """config: the file that it was started with, and reads again at SIGUSR1."""

    url: str
    model: str
    process: subprocess.Popen[str]
    config: Path

    def titled(self, *words: str) -> list[psutil.Process]:
        """Its processes whose title has all these words, without those that just end."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error):
                title = " ".join(process.cmdline())
                if all(word in title for word in words):
                    found.append(process)
        return found


def _environment() -> dict[str, str]:
    """This process's environment as a user's shell has it: without what its own cluster set, and
    with all threads."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "OMP_"))}


def ctrl_c(process: subprocess.Popen[str]) -> None:
    """As a terminal sends it: to all processes in the foreground, Ray's own among them."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)


@contextmanager
def running(
    folder: Path,
    args: dict[str, Any],
    *,
    python_path: Sequence[Path] = (),
    cwd: Path = ROOT,
    **deployment: Any,
) -> Iterator[Server]:
    """`legato serve CONFIG` until the block ends, then Ctrl-C as a user would.

    python_path: folders that Python searches before the checkout. A lone replica answers HTTP
    itself; with `deployment` (num_replicas=2, ...) there are such engines behind a front.
    """
    name = "two_replicas" if deployment else "demo"
    config: dict[str, Any] = yaml.safe_load((ROOT / f"configs/serve/{name}.yaml").read_text())
    application = config["applications"][0]
    # Tests that lose no stages need no standby, whose start would compete with theirs.
    engine = {"standby": False, **args.get("engine", {})}
    application["args"] = {"listen": "127.0.0.1:8000", **args, "engine": engine}
    if deployment:
        application["args"].setdefault("fleet", {})
        application["deployments"] = [{"name": "Engine", **deployment}]
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(config))
    port = free_port()
    command = [sys.executable, "-P", "-m", "app.cli.main", "serve", str(path), "--port", str(port)]
    log = (folder / "serve.log").open("w")
    process = subprocess.Popen(
        command,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env={
            **_environment(),
            "PYTHONPATH": ":".join(map(str, (*python_path, ROOT))),
            "RAY_TMPDIR": "/tmp",
        },
        start_new_session=True,
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
        keys = list(args.get("api", {}).get("api_keys", {}))
        headers = {"authorization": f"Bearer {keys[0]}"} if keys else {}
        model = httpx.get(f"{url}/v1/models", headers=headers).json()["data"][0]["id"]
        yield Server(url, model, process, path)
    finally:
        ctrl_c(process)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()
