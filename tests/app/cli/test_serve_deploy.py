"""A running server reads its config again: no content of the file may end it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.cli.serve_config import load_config, set_address
from app.cli.serve_deploy import deploy_again
from app.settings.model_folder import SettingsError

pytestmark = pytest.mark.ray  # the config is one of Ray Serve's schema


class Client:
    """Of Serve, whose deployments it stands for."""

    def __init__(self, error: Exception | None = None) -> None:
        self.deployed: list[Any] = []
        self._error = error

    def deploy_apps(self, schema: Any, _blocking: bool) -> None:
        if self._error is not None:
            raise self._error
        self.deployed.append(schema)


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


def test_a_right_one_is_deployed() -> None:
    client, changed = Client(), _running()
    assert deploy_again(client, _running(), lambda: changed, 8) is changed
    assert len(client.deployed) == 1
