"""Names on a hub where a command takes a model, with a small hub on loopback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.actors.stage.weights import gguf_files
from tests.local_hub import ROOT, LocalHub, run, serving

pytestmark = pytest.mark.heavy  # commands in processes of their own

_NAMES = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    files = {name: (ROOT / "configs/models/demo" / name).read_bytes() for name in _NAMES}
    with serving(LocalHub({"org/demo": {"main": files}})) as hub:
        yield hub


def test_check_downloads_and_describes(hub: LocalHub, tmp_path: Path) -> None:
    ran = run(hub, tmp_path, "-m", "app.cli.main", "check", "org/demo@main")
    assert ran.stdout.startswith("org/demo@main: ok. LlamaForCausalLM, "), ran.stderr
    assert sorted(hub.files_sent()) == sorted(_NAMES)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (b"NoSuchForCausalLM", "NoSuchForCausalLM"),
        (b'LlamaForCausalLM"], "x": ["y', "is not known to have it"),
    ],
)
def test_weights_of_a_model_that_would_not_load_are_not_downloaded(
    hub: LocalHub, tmp_path: Path, changed: bytes, said: str
) -> None:
    files = hub.models["org/demo"]["main"]
    files["config.json"] = files["config.json"].replace(b"LlamaForCausalLM", changed)
    ran = run(hub, tmp_path, "-m", "app.cli.main", "check", "org/demo@main")
    assert said in ran.stderr
    assert ran.returncode == 2
    assert "model.safetensors" not in hub.files_sent()


def test_how_a_model_of_embeddings_pools_is_downloaded(hub: LocalHub, tmp_path: Path) -> None:
    pooling = {"1_Pooling/config.json": b"{}", "onnx/config.json": b"{}"}
    hub.models["org/demo"]["main"].update(pooling)
    ran = run(hub, tmp_path, "-m", "app.cli.main", "config", "show", "--resolved", "org/demo")
    assert (Path(json.loads(ran.stdout)["stage"]["model_path"]) / "1_Pooling/config.json").is_file()
    assert "onnx/config.json" not in hub.files_sent()


def test_settings_need_no_weights(hub: LocalHub, tmp_path: Path) -> None:
    ran = run(hub, tmp_path, "-m", "app.cli.main", "config", "show", "--resolved", "org/demo")
    stage = json.loads(ran.stdout)["stage"]
    commit = hub.commit_of("org/demo", "main")
    assert stage["hub_model"] == f"org/demo@{commit}"
    assert Path(stage["model_path"]) == tmp_path / "hub/models--org--demo/snapshots" / commit
    assert "model.safetensors" not in hub.files_sent()


_SAME_FOLDER = """
import sys
from actors.stage.hub_folder import on_this_node
from app.settings.load import parse, resolve
spec = resolve(parse({"model": {"path": sys.argv[1]}})).stage
assert on_this_node(spec) == spec
print(spec.hub_model, spec.model_path)
"""


@pytest.mark.long
def test_a_gguf_file_becomes_a_folder(hub: LocalHub, tmp_path: Path) -> None:
    gguf_files.write(tmp_path / "tiny.gguf", "qwen2", gguf_files.Kind.Q8_0)
    hub.models["org/gguf"] = {"main": {"tiny.gguf": (tmp_path / "tiny.gguf").read_bytes()}}
    ran = run(hub, tmp_path, "-m", "app.cli.main", "check", "org/gguf/tiny.gguf")
    assert "Qwen2ForCausalLM, 3 layers" in ran.stdout, ran.stderr
    ran = run(hub, tmp_path, "-c", _SAME_FOLDER, "org/gguf/tiny.gguf")
    name, folder = ran.stdout.split()
    assert name == f"org/gguf/tiny.gguf@{hub.commit_of('org/gguf', 'main')}"
    assert Path(folder).parent == tmp_path / "legato/gguf"


@pytest.mark.parametrize("command", ["serve", "check"])
def test_a_name_that_is_none_ends_the_command(hub: LocalHub, tmp_path: Path, command: str) -> None:
    ran = run(hub, tmp_path, "-m", "app.cli.main", command, "org/none")
    assert ran.returncode == 2
    (line,) = ran.stderr.splitlines()
    assert line.startswith("error: model.path: no folder 'org/none' in ")
    assert ", and 127.0.0.1:" in line
    assert "has no model org/none" in line


def test_a_folder_is_preferred(hub: LocalHub, tmp_path: Path) -> None:
    (tmp_path / "org").mkdir()
    (tmp_path / "org/demo").symlink_to(ROOT / "configs/models/demo")
    command = ("-m", "app.cli.main", "config", "show", "--resolved", "org/demo")
    stage = json.loads(run(hub, tmp_path, *command, cwd=tmp_path).stdout)["stage"]
    assert Path(stage["model_path"]) == ROOT / "configs/models/demo"
    assert not stage["hub_model"]
    assert hub.requests == []
