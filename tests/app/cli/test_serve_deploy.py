"""A running server reads its config again: no content of the file may end it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.api.http.keys import by_digest
from app.cli.serve_config import load_config, set_address
from app.cli.serve_deploy import deploy_again
from app.settings.model_folder import SettingsError

pytestmark = pytest.mark.ray  # the config is one of Ray Serve's schema


class Client:
    """Of Serve, whose deployments it stands for."""

    def __init__(self, error: Exception | None = None) -> None:
        self.deployed: list[Any] = []
        self.status, self.message = "RUNNING", ""
        self._error = error

    def deploy_apps(self, schema: Any, _blocking: bool) -> None:
        if self._error is not None:
            raise self._error
        self.deployed.append(schema)

    def get_serve_details(self) -> dict[str, Any]:
        deployment = {"status": "HEALTHY", "message": self.message}
        application = {
            "status": self.status,
            "message": "",
            "last_deployed_time_s": float(len(self.deployed)),
            "deployments": {"LLMServer": deployment},
        }
        return {"applications": {"legato": application}}


def _running() -> dict[str, Any]:
    config = load_config(Path("configs/serve/demo.yaml"))
    set_address(config, None, None)
    return config


def _raise(error: Exception) -> Callable[[], dict[str, Any]]:
    def read() -> dict[str, Any]:
        raise error

    return read


@pytest.mark.parametrize(
    "error", [SettingsError("bad"), AttributeError("bad"), TypeError("bad"), KeyError("bad")]
)
def test_a_file_that_cannot_be_read_changes_nothing(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    config, client = _running(), Client()
    assert deploy_again(client, config, _raise(error), 8) is config
    assert client.deployed == []
    printed = capsys.readouterr().err
    assert "is not deployed" in printed
    assert "bad" in printed


def test_serve_which_logs_a_config_gets_digests_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.cli.serve_deploy._LOOK_S", 0.01)
    client, changed = Client(), _running()
    changed["applications"][0]["args"]["api"] = {"api_keys": {"sesame": {}, "env:A_KEY": {}}}
    others = {*threading.enumerate()}
    assert deploy_again(client, _running(), lambda: changed, 8) is changed
    for thread in {*threading.enumerate()} - others:
        thread.join(30)
    (schema,) = client.deployed
    given = list(schema.applications[0].args["api"]["api_keys"])
    assert given == [by_digest("sesame"), "env:A_KEY"]
    assert "sesame" in changed["applications"][0]["args"]["api"]["api_keys"], "for the banner"


def test_a_value_that_serve_refuses_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    config, client = _running(), Client()
    changed = _running()
    changed["applications"][0]["deployments"] = [{"name": "LLMServer", "num_replicas": -2}]
    assert deploy_again(client, config, lambda: changed, 8) is config
    assert client.deployed == []
    assert "applications.0.deployments.0.num_replicas" in capsys.readouterr().err


def test_an_error_of_serve_is_survived(capsys: pytest.CaptureFixture[str]) -> None:
    config = _running()
    assert deploy_again(Client(RuntimeError("controller")), config, _running, 8) is config
    assert "RuntimeError: controller" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "message", "said"),
    [
        ("RUNNING", "", "the changed config is deployed"),
        (
            "DEPLOY_FAILED",
            "Traceback\nray.exceptions.RayTaskError: ...\n"
            "app.settings.model_folder.SettingsError: kv.memory_gib: too little",
            "the changed config does not run: kv.memory_gib: too little",
        ),
    ],
)
def test_a_right_one_is_deployed_and_its_end_is_told(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: str,
    message: str,
    said: str,
) -> None:
    monkeypatch.setattr("app.cli.serve_deploy._LOOK_S", 0.01)
    client, changed = Client(), _running()
    client.status, client.message = status, message
    others = {*threading.enumerate()}
    assert deploy_again(client, _running(), lambda: changed, 8) is changed
    assert len(client.deployed) == 1
    for thread in {*threading.enumerate()} - others:
        thread.join(30)
    printed = capsys.readouterr()
    assert said in printed.out + printed.err
