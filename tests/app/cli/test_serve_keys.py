"""Keys outside `args`, where Serve would ignore what it does not know."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from app.cli.main import app
from app.cli.serve_config import load_config
from app.cli.serve_keys import OURS, check_serve_keys, first_of_ours
from app.settings.model_folder import SettingsError

pytestmark = pytest.mark.ray  # the keys are those of Ray Serve's schema


@pytest.mark.parametrize("config", sorted(Path("configs/serve").glob("*.yaml")), ids=str)
def test_shipped_configs_have_no_unknown_key(config: Path) -> None:
    check_serve_keys(load_config(config))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(foo=1), "foo: unknown key"),
        (lambda c: c.update(proxy_locaton="Disabled"), "proxy_locaton: .* 'proxy_location'"),
        (lambda c: c.update(http_options={"prot": 1}), "http_options.prot: .* mean 'port'"),
        (
            lambda c: c["applications"][0].update(deployment=[]),
            "applications.0.deployment: .* mean 'deployments'",
        ),
        (
            lambda c: c["applications"][0].update(deployments=[{"name": "A", "num_replica": 2}]),
            "applications.0.deployments.A.num_replica: .* mean 'num_replicas'",
        ),
        (
            lambda c: c["applications"][0].update(
                deployments=[{"name": "A", "autoscaling_config": {"max_replica": 2}}]
            ),
            "applications.0.deployments.A.autoscaling_config.max_replica: .* 'max_replicas'",
        ),
        (lambda c: c["applications"][0].update(import_path="app.man:build_app"), "import_path: no"),
        (lambda c: c["applications"][0].update(import_path="app.main:build"), "import_path: no"),
        (lambda c: c["applications"][0].update(import_path="nope.x:y"), "import_path: no 'nope.x"),
    ],
)
def test_what_serve_would_ignore_is_refused_by_name(
    change: Callable[[dict[str, Any]], None], message: str
) -> None:
    config = load_config(Path("configs/serve/demo.yaml"))
    change(config)
    with pytest.raises(SettingsError, match=f"^{message}"):
        check_serve_keys(config)


@pytest.mark.parametrize(
    ("deployment", "message"),
    [
        ({}, "0.name: Field required"),
        ({"name": "A", "num_replicas": "two"}, "0: .*num_replicas.* must be an int"),
        ({"name": "A", "num_replicas": -1}, "0.num_replicas: "),
        ({"name": "A", "autoscaling_config": {"min_replicas": 3, "max_replicas": 2}}, "0.auto"),
        (
            {"name": "A", "autoscaling_config": {"target_ongoing_requests": "x"}},
            "0.autoscaling_config.target_ongoing_requests: ",
        ),
    ],
)
def test_a_value_that_serve_refuses_is_named(deployment: dict[str, Any], message: str) -> None:
    config = load_config(Path("configs/serve/demo.yaml"))
    config["applications"][0]["deployments"] = [deployment]
    with pytest.raises(SettingsError, match=rf"^applications.0.deployments.{message}"):
        check_serve_keys(config)


def test_auto_brings_bounds_of_its_own() -> None:
    config = load_config(Path("configs/serve/demo.yaml"))
    scaled = {"name": "A", "num_replicas": "auto", "autoscaling_config": {"min_replicas": 3}}
    config["applications"][0]["deployments"] = [scaled]
    check_serve_keys(config)


def test_a_module_that_comes_with_the_runtime_env_is_not_looked_for() -> None:
    config = load_config(Path("configs/serve/demo.yaml"))
    runtime_env = {"working_dir": "https://example.org/theirs.zip"}
    config["applications"][0] |= {"import_path": "theirs:app", "runtime_env": runtime_env}
    check_serve_keys(config)


@pytest.mark.parametrize(
    ("applications", "shown"),
    [
        ([("theirs:app", "/"), (OURS, None), (OURS, "/llm"), (OURS, "/other")], 2),
        ([("theirs:app", None), (OURS, "/")], 1),
        ([("wraps:ours", "/llm")], 0),
    ],
)
def test_the_banner_is_of_the_first_of_ours_that_http_reaches(
    applications: list[tuple[str, str | None]], shown: int
) -> None:
    found = [{"import_path": path, "route_prefix": prefix} for path, prefix in applications]
    assert first_of_ours(found) is found[shown]


def test_config_check_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(Path("configs/serve/demo.yaml").read_text() + "\nfoo: 1\n")
    found = CliRunner().invoke(app, ["config", "check", str(path)])
    assert (found.exit_code, "foo: unknown key" in found.stderr) == (2, True)
    demo = Path("configs/serve/demo.yaml").read_text()
    path.write_text(demo.replace("proxy_location: Disabled", "proxy_location: Here"))
    found = CliRunner().invoke(app, ["config", "check", str(path)])
    assert (found.exit_code, "proxy_location: " in found.stderr) == (2, True)
