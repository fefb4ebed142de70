"""The command line: help for every command, errors that name the key, settings that resolve."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from app.cli.main import app
from app.settings import SettingsError, parse, resolve

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs/serve").glob("*.yaml"))
runner = CliRunner()


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


COMMANDS = (
    "serve", "generate", "chat", "profile", "simulate", "capacity", "plot", "trace", "replay",
    "bench serve", "bench stall", "bench engine", "bench overhead", "bench policies",
    "bench budgets",
    "config check", "config show", "config reference",
)  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    result = runner.invoke(app, [*command.split(), "--help"])
    assert result.exit_code == 0, result.output
    assert "Usage" in result.output


@pytest.mark.parametrize("config", CONFIGS, ids=lambda p: p.stem)
def test_shipped_configs_are_valid(config: Path) -> None:
    assert runner.invoke(app, ["config", "check", str(config)]).exit_code == 0
    shown = runner.invoke(app, ["config", "show", str(config)])
    assert json.loads(shown.stdout)["stage"]["model_path"].startswith(str(ROOT / "configs/models"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scheduling": {"token_budge": 64}}, "scheduling.token_budge: unknown setting; did you"),
        ({"scheduling": {"policy": "sarathy"}}, "unknown 'sarathy'; known: chunked_only"),
        ({"parallel": {"pipeline_stages": 99}}, "parallel.pipeline_stages: 99 stages for"),
        ({"model": {"path": "no/such/folder"}}, "model.path: no folder 'no/such/folder'"),
        ({"slo": {"tbt_ms": -5}}, "slo.tbt_ms"),
        ({"parallel": {"symmetric_memory": True}}, "symmetric_memory: needs parallel.device: cuda"),
        (
            {"parallel": {"activations": "accelerator"}},
            "accelerator needs parallel.device: cuda and",
        ),
        ({"api": {"max_m": 3}}, "api.max_m: unknown setting; did you mean 'max_n'"),
    ],
)
def test_wrong_settings_are_named(changes: dict[str, dict[str, object]], message: str) -> None:
    args = {"model": {"path": "configs/models/demo"}, **changes}
    with pytest.raises(SettingsError) as caught:
        resolve(parse(args))
    assert message in str(caught.value)


def test_serve_refuses_a_bad_config_before_anything_starts(tmp_path: Path) -> None:
    config = yaml.safe_load((ROOT / "configs/serve/demo.yaml").read_text())
    config["applications"][0]["args"]["kv"]["block_sise"] = 16
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(config))
    result = runner.invoke(app, ["serve", str(path)])
    assert result.exit_code == 2
    assert "block_sise" in result.output
    assert "block_size" in result.output


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"proxy_location": "HeadOnly"}, "listen: needs proxy_location: Disabled"),
        ({"deployments": [{"name": "LLMServer", "num_replicas": 2}]}, "only for one replica"),
        ({"listen": None}, "proxy_location: Disabled leaves no HTTP"),
        ({"listen": "8000"}, "listen: String should match"),
        ({"listen": "127.0.0.1:0"}, "the port must lie between 1 and 65535"),
        ({"listen": "127.0.0.1:70000"}, "the port must lie between 1 and 65535"),
        ({"listen": "no.such.host.invalid:8000"}, "cannot listen on no.such.host.invalid:8000"),
    ],
)
def test_serve_refuses_a_config_that_could_not_be_reached(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    config = yaml.safe_load((ROOT / "configs/serve/demo.yaml").read_text())
    application = config["applications"][0]
    for key, value in changes.items():
        place = {"proxy_location": config, "listen": application["args"]}.get(key, application)
        place[key] = value
    path = tmp_path / "unreachable.yaml"
    path.write_text(yaml.safe_dump(config))
    result = runner.invoke(app, ["serve", str(path)])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_serve_says_at_once_that_a_port_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = runner.invoke(app, ["serve", "configs/serve/demo.yaml", "--port", str(port)])
    assert result.exit_code == 2
    assert f"cannot listen on 127.0.0.1:{port}" in result.output


def test_generate_says_how_to_start_a_server() -> None:
    result = runner.invoke(app, ["generate", "hello", "--url", "http://127.0.0.1:9"])
    assert result.exit_code == 1
    assert "legato serve" in result.output


def test_the_settings_reference_is_current() -> None:
    printed = runner.invoke(app, ["config", "reference"]).stdout.strip()
    assert printed in (ROOT / "configs/README.md").read_text(), "run legato config reference"
