"""Legato as a wheel: what it carries, and that it works in an empty folder, without a checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.ports import free_port

# Where the checkout's library is older than its sources, the build compiles the CPU kernels.
pytestmark = [pytest.mark.serve, pytest.mark.timeout(1200)]

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("app", "actors", "kernels", "configs")
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads, so that it leaves nothing in the checkout."""
    copy = tmp_path_factory.mktemp("source")
    for room in ROOMS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / room, copy / room, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = "-m pip wheel . --no-deps --no-build-isolation --no-index --quiet --wheel-dir"
    run = subprocess.run(
        [sys.executable, *command.split(), str(folder)], cwd=source, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    (made,) = folder.iterdir()
    return made


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """As after `pip install` of the wheel: its modules come before those of the checkout."""
    site = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(site)
    plain = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    return {**plain, "PYTHONPATH": str(site), "RAY_TMPDIR": "/tmp", "COLUMNS": "100"}


@pytest.fixture
def legato(environment: dict[str, str], tmp_path: Path) -> Run:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "app.cli.main", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )

    return run


def test_the_wheel_carries_every_module_and_what_they_read(source: Path, wheel: Path) -> None:
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    modules = {
        path.relative_to(source).as_posix()
        for room in ("app", "actors", "kernels")
        for path in (source / room).rglob("*.py")
    }
    assert {name for name in names if name.endswith(".py")} == modules
    page = {p.relative_to(source).as_posix() for p in (source / "app/console/page").iterdir()}
    configs = {
        path.relative_to(source).as_posix()
        for pattern in (
            "serve/*.yaml", "workloads/*.yaml", "bench/*.yaml", "hardware/*.json",
            "hardware/operators/*.json", "models/shapes/*/*.json", "models/demo/*.json",
            "models/demo/model.safetensors", "models/demo/README.md",
        )
        for path in (source / "configs").glob(pattern)
    }  # fmt: skip
    library = {"kernels/cpu/liblegato.so"} if sys.platform == "linux" else set()
    assert names - modules == page | configs | library


def test_one_wheel_serves_every_python(wheel: Path) -> None:
    assert "-py3-none-" in wheel.name


def test_the_source_distribution_builds_the_same(source: Path, wheel: Path, tmp_path: Path) -> None:
    script = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=source, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    (archive,) = tmp_path.iterdir()
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    carried = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    kernels = {f"kernels/cpu/src/{p.name}" for p in (source / "kernels/cpu/src").glob("*.[ch]*")}
    wanted = carried - {"kernels/cpu/liblegato.so"} | kernels | {"setup.py", "pyproject.toml"}
    assert not wanted - names


# Several commands in one process, which imports what they need once.
COMMANDS = """
import json, sys
from typer.testing import CliRunner
from app.cli.main import app
for arguments in json.loads(sys.argv[1]):
    result = CliRunner().invoke(app, arguments)
    print(json.dumps([result.exit_code, result.stdout, result.output]))
"""


def test_commands_find_what_came_with_them(environment: dict[str, str], tmp_path: Path) -> None:
    site = environment["PYTHONPATH"]
    commands = [
        ["config", "check"],
        ["config", "show", "--resolved"],
        ["config", "check", "configs/serve/bench_135m_adaptive.yaml"],  # a shape, a cost model
        ["config", "check", "configs/serve/two_stages.yaml"],
        ["simulate", "--workload", "configs/workloads/laptop.yaml", "--json"],
        ["simulate", "llama-135m-cpu-2-cores", "--requests", "16", "--json"],
        ["simulate", "configs/hardware/mistral-7b-a100.json", "--requests", "16", "--json"],
    ]
    ran = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(commands)],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [code for code, _, _ in found] == [0] * len(commands), found
    texts = [text for _, text, _ in found]
    assert texts[0] == "configs/serve/demo.yaml: ok\n"
    assert json.loads(texts[1])["stage"]["model_path"] == f"{site}/configs/models/demo"
    assert all(json.loads(text)["num_completed"] > 0 for text in texts[4:])


def test_a_file_of_the_working_folder_comes_first(legato: Run, tmp_path: Path) -> None:
    (tmp_path / "configs/serve").mkdir(parents=True)
    (tmp_path / "configs/serve/demo.yaml").write_text("applications: []\n")
    checked = legato("config", "check", "configs/serve/demo.yaml")
    assert checked.returncode == 2
    assert "needs a list `applications`" in checked.stderr


def test_the_demo_is_served_and_asked_from_an_empty_folder(
    legato: Run, environment: dict[str, str], tmp_path: Path
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with (tmp_path / "serve.log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "app.cli.main", "serve", "--port", str(port)],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        assert server.stdout is not None
        is_ready = any("ready in" in line for line in server.stdout)
        assert is_ready, (tmp_path / "serve.log").read_text()[-3000:]
        asked = legato("generate", "Hello", "--url", f"{url}/v1", "--max-tokens", "4", "--json")
        assert asked.returncode == 0, asked.stderr
        assert json.loads(asked.stdout)["usage"]["completion_tokens"] == 4
        events = stream_until_the_end(server, url)
    except BaseException:
        server.terminate()
        server.wait(120)
        raise
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 400
    assert server.wait(120) == 0
    assert (tmp_path / "serve.log").read_text().count("draining and stopping") == 1


def stream_until_the_end(server: subprocess.Popen[str], url: str) -> list[str]:
    """The events of a stream whose server is told to stop meanwhile, as systemd, Docker and
    Kubernetes tell it."""
    body = {"model": "demo", "prompt": "def", "max_tokens": 400, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    events: list[str] = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
        for line in filter(None, answer.iter_lines()):
            if not events:
                server.terminate()
            events.append(line)
    return events
