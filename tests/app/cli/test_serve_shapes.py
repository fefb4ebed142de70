"""A config whose keys outside `args` have values of another kind: refused, by file and key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from app.cli.serve_config import load_config
from app.settings.model_folder import SettingsError

_OF_IT = "applications.0.deployments"


@pytest.mark.parametrize(
    ("deployments", "message"),
    [
        ({"name": "Engine", "num_replicas": 2}, f"{_OF_IT}: must be a list"),
        (3, f"{_OF_IT}: must be a list, not 3"),
        (0, f"{_OF_IT}: must be a list, not 0"),
        (["Engine"], f"{_OF_IT}.0: must be a mapping, not 'Engine'"),
        ([{"num_replicas": 2}], f"{_OF_IT}.0: lacks `name`"),
        ([{"name": ["Engine"]}], f"{_OF_IT}.0.name: must be text"),
        ([{"name": "E", "num_replicas": "two"}], f"{_OF_IT}.0.num_replicas: must be a whole"),
        ([{"name": "E", "num_replicas": True}], f"{_OF_IT}.0.num_replicas: must be a whole"),
        ([{"name": "E"}, {"name": "F", "autoscaling_config": "auto"}], f"{_OF_IT}.1.autoscaling_c"),
        (
            [{"name": "E", "autoscaling_config": {"min_replicas": "one"}}],
            f"{_OF_IT}.0.autoscaling_config.min_replicas: must be a whole number, not 'one'",
        ),
        (
            [{"name": "E", "graceful_shutdown_timeout_s": "long"}],
            f"{_OF_IT}.0.graceful_shutdown_timeout_s: must be a number",
        ),
    ],
)
def test_deployments(deployments: Any, message: str, tmp_path: Path) -> None:
    config = yaml.safe_load(Path("configs/serve/demo.yaml").read_text())
    config["applications"][0]["deployments"] = deployments
    _is_refused(config, message, tmp_path)


@pytest.mark.parametrize(
    ("http", "message"),
    [
        ("abc", "http_options: must be a mapping, not 'abc'"),
        ([1], r"http_options: must be a mapping, not \[1\]"),
        ({"host": 3}, "http_options.host: must be text, not 3"),
        ({"port": "any"}, "http_options.port: must be a whole number, not 'any'"),
    ],
)
def test_http_options(http: Any, message: str, tmp_path: Path) -> None:
    config = yaml.safe_load(Path("configs/serve/demo.yaml").read_text())
    _is_refused({**config, "http_options": http}, message, tmp_path)


def _is_refused(config: dict[str, Any], message: str, folder: Path) -> None:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(SettingsError, match=f"^{path}: {message}"):
        load_config(path)


@pytest.mark.parametrize("config", sorted(Path("configs/serve").glob("*.yaml")), ids=str)
def test_shipped_configs_have_the_right_ones(config: Path) -> None:
    load_config(config)


def test_null_is_absent(tmp_path: Path) -> None:
    config = yaml.safe_load(Path("configs/serve/demo.yaml").read_text())
    config["applications"][0]["deployments"] = None
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**config, "http_options": None}))
    assert load_config(path)["http_options"] is None
