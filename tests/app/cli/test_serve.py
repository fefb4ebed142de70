"""What `legato serve` says and does while it starts and ends."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from app.cli.serve import _wait


@pytest.mark.ray  # whose status is asked
def test_a_replica_that_finds_no_room_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits = "Deployment 'A' has 1 replicas that\nhave taken more than 30s to be scheduled."
    told = iter([("DEPLOYING", waits), ("DEPLOYING", waits), ("DEPLOY_FAILED", "it broke")])

    def status() -> Any:
        state, message = next(told)
        deployments = {"A": SimpleNamespace(message=message)}
        application = SimpleNamespace(
            status=SimpleNamespace(value=state), message="", deployments=deployments
        )
        return SimpleNamespace(applications={"legato": application})

    monkeypatch.setattr("ray.serve.status", status)
    monkeypatch.setattr("app.cli.serve._STATUS_PERIOD_S", 0.0)
    spinner: Any = SimpleNamespace(update=lambda text: None)
    assert _wait("http://127.0.0.1:9", [], spinner, threading.Event(), []) == "it broke"
    said = "Serve: Deployment 'A' has 1 replicas that have taken more than 30s to be scheduled.\n"
    assert capsys.readouterr().err == said
