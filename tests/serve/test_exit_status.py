"""How `legato serve` ends: where only a replica finds that a setting will not do, and at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
DEMO = {"path": "configs/models/demo"}


def test_a_setting_that_only_the_replica_can_check_ends_as_one_found_early(tmp_path: Path) -> None:
    """Found by a stage, whose errors reach the command through the scheduler."""
    config = yaml.safe_load((ROOT / "configs/serve/demo.yaml").read_text())
    args = config["applications"][0]["args"]
    args["model"] = {**DEMO, "quantization": "fp8"}
    args.update(parallel={"device": "cpu"}, engine={"standby": False})
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(config))
    own = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "OMP_"))}
    command = [sys.executable, "-P", "-m", "app.cli.main", "serve", str(path)]
    ran = subprocess.run(
        [*command, "--port", str(free_port())],
        cwd=ROOT,
        env={**own, "PYTHONPATH": str(ROOT), "RAY_TMPDIR": "/tmp"},
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert "error: model.quantization: backend" in ran.stderr
    assert ran.returncode == 2, ran.stderr


@pytest.mark.long
def test_a_server_told_to_stop_at_once_leaves_nothing_in_shared_memory(
    serve: Callable[..., Any], tiny_model: Callable[..., Path]
) -> None:
    """Ctrl-C again and again, while a stream that would go on for minutes is drained."""
    num_tokens = 1 << 18
    args = {
        "model": {"path": str(tiny_model("llama", max_position_embeddings=num_tokens))},
        "parallel": {"pipeline_stages": 2},
        "kv": {"memory_gib": 0.3},
    }
    with serve(args) as server:
        (raylet,) = {int(one.pid) for one in server.titled("raylet/raylet")}
        left = f"sem.*{raylet}-*"
        assert list(Path("/dev/shm").glob(left))
        body = {"model": server.model, "prompt": [5, 6, 7], "max_tokens": num_tokens - 8,
                "ignore_eos": True, "stream": True}  # fmt: skip
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
            lines = answer.iter_lines()  # which ends the stream when it is dropped
            next(lines)
            while server.process.poll() is None:
                server.process.send_signal(signal.SIGINT)
                time.sleep(0.2)  # the second one counts
        assert server.process.wait() == 130
        assert not list(Path("/dev/shm").glob(left))
