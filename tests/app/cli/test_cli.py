"""The command line: help for every command, errors that name the key, configs that resolve."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import httpx
import pytest
import yaml
from typer.testing import CliRunner

from app.cli.main import PANELS, app
from app.cli.serve import _answers

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = sorted((ROOT / "configs/serve").glob("*.yaml"))
runner = CliRunner()


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


COMMANDS = (
    "serve", "status", "generate", "chat", "batch", "profile", "simulate", "capacity", "plot",
    "trace", "replay", "explain", "bench serve", "bench stall", "bench engine", "bench overhead",
    "bench policies", "bench budgets", "chaos",
    "config check", "config show", "config reference", "models", "check",
)  # fmt: skip


def test_the_list_is_whole() -> None:
    listed = {command for command in COMMANDS if " " not in command} | {"bench", "config"}
    assert listed == {name for names in PANELS.values() for name in names}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    result = runner.invoke(app, [*command.split(), "--help"])
    assert result.exit_code == 0, result.output
    assert "Usage" in result.output


def test_it_says_its_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert runner.invoke(app, ["--version"]).output == f"legato {project['version']}\n"


@pytest.mark.ray  # whose schema knows the keys beside `args`
@pytest.mark.parametrize("config", CONFIGS, ids=lambda p: p.stem)
def test_shipped_configs_are_valid(config: Path) -> None:
    assert runner.invoke(app, ["config", "check", str(config)]).exit_code == 0
    shown = runner.invoke(app, ["config", "show", "--resolved", str(config)])
    found = json.loads(shown.stdout)
    for resolved in found if isinstance(found, list) else [found]:
        assert resolved["stage"]["model_path"].startswith(str(ROOT / "configs/models"))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda p: p.stem)
def test_a_config_is_shown_as_one_that_means_the_same(config: Path, tmp_path: Path) -> None:
    def show(*arguments: str | Path) -> str:
        result = runner.invoke(app, ["config", "show", *map(str, arguments)])
        assert result.exit_code == 0, result.output
        return result.stdout

    saved = tmp_path / "saved.yaml"
    saved.write_text(show(config))
    given, found = yaml.safe_load(config.read_text()), yaml.safe_load(saved.read_text())
    for application, filled in zip(given["applications"], found["applications"], strict=True):
        assert filled["args"]["telemetry"]["events"] is False  # a default
        application["args"] = filled["args"]
    assert found == given
    assert show(saved) == saved.read_text()
    assert show("--resolved", saved) == show("--resolved", config)


def test_it_serves_once_every_model_answers() -> None:
    def answers(status: int, body: dict[str, object]) -> bool:
        transport = httpx.MockTransport(lambda request: httpx.Response(status, json=body))
        return _answers(httpx.Client(base_url="http://here", transport=transport), "/health")

    assert answers(200, {"status": "ready"})
    assert answers(200, {"status": "ready", "models": {"a": True, "b": True}})
    assert not answers(200, {"status": "ready", "models": {"a": True, "b": False}})
    assert not answers(503, {"error": {}})


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
        ({"listen": "8000"}, "listen: must be host:port, such as 127.0.0.1:8000, not '8000'"),
        ({"listen": "127.0.0.1:0"}, "the port must lie between 1 and 65535"),
        ({"listen": "127.0.0.1:70000"}, "error: listen: the port must lie between 1 and 65535"),
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
    said = f"cannot listen on 127.0.0.1:{port}: address already in use; choose with --host"
    assert said in " ".join(result.output.split())


def test_generate_says_how_to_start_a_server() -> None:
    result = runner.invoke(app, ["generate", "hello", "--url", "http://127.0.0.1:9"])
    assert result.exit_code == 1
    assert "legato serve" in result.output


def test_the_settings_reference_is_current() -> None:
    printed = runner.invoke(app, ["config", "reference"]).stdout
    written = (ROOT / "configs/README.md").read_text()
    assert printed == written, "legato config reference > configs/README.md"
    assert "Undefined" not in printed
    without = [line for line in printed.splitlines() if line.endswith(("|  |", "| None |"))]
    assert not without, f"settings without a description: {without}"


@pytest.mark.ray
def test_a_model_folder_is_checked_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").symlink_to(ROOT / "configs/models/demo")
    monkeypatch.chdir(tmp_path)
    shown = runner.invoke(app, ["config", "show", "--resolved", "mine"])
    assert json.loads(shown.stdout)["stage"]["model_path"] == str(ROOT / "configs/models/demo")
    own = json.loads(shown.stdout)
    assert own["kv"]["gib"] is None, "the demo's memory is not another model's"
    assert (own["scheduler"]["tbt_s"], own["scheduler"]["ttft_s"]) == (0.1, None)
    checked = runner.invoke(app, ["config", "check"])
    assert (checked.exit_code, checked.stdout) == (0, "configs/serve/demo.yaml: ok\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (": [", "is not YAML"),
        ("\x00", "is not YAML"),
        ("applications: {}", "needs a list `applications`"),
        ("modle: {path: demo}", "modle: unknown key; did you mean 'model'?"),
        ("aplications: []", "did you mean 'applications'?"),
        ("slo: {tbt_ms: 50}", "`legato config show` prints a whole config"),
        ("applications: [1]", "applications.0: must be a mapping"),
        ("applications: [{args: {}}]", "lacks `import_path"),
        (
            "applications: [{import_path: OURS, args: {listen: x}}]\nproxy_location: Disabled",
            "host:port",
        ),
        (
            "applications: [{import_path: OURS, args: [1]}]",
            "applications.0.args: must be a mapping",
        ),
        ("applications: [{import_path: OURS, args: {}}]", "model: Field required"),
        (
            "applications: [{import_path: OURS, args: {adapters: {paths: {x: a, y: b, x: c}}}}]",
            "'x' is given twice",
        ),
    ],
)
@pytest.mark.ray
def test_a_broken_config_is_refused_by_its_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text.replace("OURS", "app.main:build_app"))
    checked = runner.invoke(app, ["config", "check", str(path)])
    assert checked.exit_code == 2, checked.output
    assert f"error: {path}" in checked.output
    assert message in checked.output


def test_the_files_that_are_looked_for_are_named_as_given(tmp_path: Path) -> None:
    for missing in ("no/such.yaml", "configs/serve/no.yaml"):
        checked = runner.invoke(app, ["config", "check", missing])
        assert checked.exit_code == 2
        assert f"no config file, model folder or GGUF file '{missing}'" in checked.output


def test_models_and_folders(tmp_path: Path) -> None:
    """The demo model would load; Falcon-180B's config is fine, but there are no weights."""
    listed = runner.invoke(app, ["models"]).stdout
    assert "Gemma3ForCausalLM: Gemma 2 with" in listed
    assert "Gemma3ForConditionalGeneration: The decoder of Gemma 3 with images" in listed
    demo = runner.invoke(app, ["check", "configs/models/demo"])
    assert demo.exit_code == 0
    assert "ok. LlamaForCausalLM, 8 layers, 5.8 M parameters" in demo.stdout
    assert demo.stdout.endswith("say otherwise: temperature 0.7, top_p 0.95\n")
    split = runner.invoke(app, ["check", "configs/models/demo", "--tensor-ranks", "7"])
    assert split.exit_code == 2
    assert "cannot be split over 7 ranks" in split.output
    falcon = runner.invoke(app, ["check", "configs/models/shapes/falcon-180b"])
    assert falcon.exit_code == 2
    assert "holds no *.safetensors weights" in falcon.output


def test_a_chat_template_that_does_not_compile_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "configs/models/demo", folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}\n{{ m.content }")
    checked = runner.invoke(app, ["check", str(folder)])
    assert checked.exit_code == 2, checked.output
    assert f"{folder}: the chat template (default) does not compile: line 2: " in checked.output


def test_a_model_without_a_tokenizer_would_not_load(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "configs/models/demo", folder)
    (folder / "tokenizer.json").unlink()
    checked = runner.invoke(app, ["check", str(folder)])
    assert (checked.exit_code, checked.stdout) == (2, "")
    assert f"{folder} holds no tokenizer.json" in checked.stderr


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["check", "FILE"], "FILE is neither a folder nor a GGUF file"),
        (["replay", "/no/such"], "no file '/no/such'"),
        (["batch", "/no/such", "out"], "/no/such: No such file or directory"),
    ],
)
def test_a_file_that_will_not_do_is_named_once(
    tmp_path: Path, command: list[str], said: str
) -> None:
    file = tmp_path / "some.txt"
    file.touch()
    result = runner.invoke(app, [part.replace("FILE", str(file)) for part in command])
    assert result.exit_code == 2
    assert result.output == f"error: {said.replace('FILE', str(file))}\n"


def test_a_key_that_is_not_there_is_named_before_anything_loads(tmp_path: Path) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text("model: {path: configs/models/demo}\napi: {api_keys: {env:NO_KEY: {}}}\n")
    result = runner.invoke(app, ["serve", str(config)])
    said = "error: api.api_keys: env:NO_KEY: it holds no key\n"
    assert (result.exit_code, result.output) == (2, said)


@pytest.mark.parametrize("command", ["", "status", "bench serve"])
def test_help_has_a_short_name(command: str) -> None:
    result = runner.invoke(app, [*command.split(), "-h"])
    assert result.exit_code == 0, result.output
    assert "Usage" in result.output


@pytest.mark.parametrize(
    "command",
    ["status", "chat", "generate", "batch", "capacity"]
    + [f"bench {name}" for name in ("serve", "stall", "overload", "classes", "shift")]
    + [f"bench {name}" for name in ("batch", "quote", "fuzz", "overhead")],
)
def test_who_talks_to_a_server_takes_a_key_by_one_name(command: str) -> None:
    result = runner.invoke(app, [*command.split(), "--help"], env={"COLUMNS": "120"})
    assert "--api-key" in result.output
    assert "--key" not in result.output


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("", "or a setting that will not do, whenever that was found."),
        ("serve", "A path that begins with configs/ and does not exist here is taken from"),
        ("config show", "Print a config with every default filled in (YAML): itself a config, to"),
        ("batch", "Each is sent with the lowest priority and only while the server's quote says"),
        (
            "bench fuzz",
            "if the replica's event loop was late by 100 ms, waits for a core left out.",
        ),
    ],
)
def test_help_is_wrapped_to_the_terminal(command: str, said: str) -> None:
    shown = runner.invoke(app, [*command.split(), "--help"], env={"COLUMNS": "200"}).output
    assert said in shown


def test_help_of_a_simulation_names_what_there_is() -> None:
    said = runner.invoke(app, ["simulate", "--help"], env={"COLUMNS": "200"}).output
    said = " ".join(said.replace("│", " ").split())
    assert "zipf, mixed, each also with /DIVISOR; or a file" in said
    assert "nvlink or ethernet, or its GB/s and microseconds as 25,5" in said


def test_ctrl_c_during_the_imports_ends_it_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import app.cli.main"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")
