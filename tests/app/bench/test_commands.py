"""Every benchmark is one `legato bench` command, listed in one place, alike in its options."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from app.bench.command import BENCHES, KERNELS, TOP_LEVEL, load
from app.cli.main import app

ROOT = Path(__file__).resolve().parents[3]
COMMANDS = {
    **{f"bench {name}": module for name, module in BENCHES.items()},
    **{f"bench kernels {name}": module for name, module in KERNELS.items()},
    **TOP_LEVEL,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    result = CliRunner().invoke(app, [*command.split(), "--help"])
    assert result.exit_code == 0, result.output
    assert f"legato {command}" in " ".join(result.output.replace("root", "legato").split())


@pytest.mark.parametrize(
    "command",
    [
        "handover --prompts 500,abc",
        "kernels linear --rows 1,2.5",
        "overload --times 1,x",
        "routers --seeds 1,",
        "validate --qps fast",
    ],
)
def test_what_is_no_number_is_refused_by_the_name_of_its_option(command: str) -> None:
    result = CliRunner().invoke(app, ["bench", *command.split()])
    assert result.exit_code == 2, result.output
    *_, option, given = command.split()
    assert f"Invalid value for {option}: '{given}'" in result.output


@pytest.mark.parametrize("module", COMMANDS.values())
def test_every_command_reports_alike(module: str) -> None:
    parameters = signature(import_module(f"app.bench.{module}").command).parameters
    assert {"context", "as_json", "out"} <= parameters.keys()


def test_no_module_with_a_command_is_left_out() -> None:
    room = ROOT / "app/bench"
    found = {
        ".".join(path.relative_to(room).with_suffix("").parts)
        for path in room.rglob("*.py")
        if "\ndef command(" in path.read_text()
    }
    assert found == set(COMMANDS.values())


def test_help_waits_for_no_heavy_import() -> None:
    script = (
        "import sys; from typer.testing import CliRunner; from app.cli.main import app; "
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0; "
        "sys.exit(str({'torch', 'ray', 'triton', 'aiohttp'} & set(sys.modules) or ''))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.stderr.strip() == ""


@pytest.mark.parametrize(
    "command", ["bench serve", "bench stall", "bench overhead", "capacity"], ids=str.split
)
def test_a_command_that_measures_nothing_fails_and_says_why(command: str) -> None:
    result = CliRunner().invoke(app, [*command.split(), "--url", "http://127.0.0.1:9/v1"])
    assert result.exit_code == 1
    assert "no list of models at http://127.0.0.1:9/v1/models" in result.output


def test_a_report_is_printed_and_written(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "report.json"
    arguments = ["bench", "simulator", "--requests", "2", "--json", "--out", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert json.loads(result.stdout) == report
    assert report["settings"] == {"requests": 2}
    assert len(report["results"]) == 6
    assert all(row["output_tokens"] > 0 for row in report["results"])


def test_out_refuses_a_folder_before_anything_is_measured(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "planning", "--out", str(tmp_path)])
    assert result.exit_code == 2


def test_commands_stand_alone_too() -> None:
    assert isinstance(load("planning", BENCHES["planning"]), typer.Typer)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("sevre", "serve"), ("bench overlaod", "overload"), ("bench kernels liner", "linear")],
)
def test_a_mistyped_command_is_told_what_may_be_meant(typed: str, meant: str) -> None:
    result = CliRunner().invoke(app, typed.split())
    assert result.exit_code == 2
    assert f"Did you mean '{meant}'?" in result.output
    assert "Did you mean" not in CliRunner().invoke(app, ["zzzzz"]).output
