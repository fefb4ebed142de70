"""What is said on a terminal that may go before the command does."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from app.terminal import LastingConsole


def test_a_terminal_that_has_hung_up_ends_no_command() -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as file:
        console = LastingConsole(file=file)
        console.print("ready")
        assert os.read(ours, 100) == b"ready\r\n"
        os.close(ours)
        console.print("draining")
        with console.status("draining"):
            console.print("stopping")
        assert console.quiet


@pytest.mark.parametrize(
    "arguments",
    [["models"], ["config", "reference"], ["--version"], ["simulate", "--figure7"]],
    ids=lambda arguments: arguments[0],
)
def test_a_command_whose_output_nobody_reads_ends_without_a_word(arguments: list[str]) -> None:
    """Written by Typer, also in one piece that is flushed at the end, and by rich."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        ended = subprocess.run(
            [sys.executable, "-m", "app.cli.main", *arguments],
            stdout=stdout, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (141, "")


def test_a_command_without_an_output_runs_plainly() -> None:
    ended = subprocess.run(
        ["sh", "-c", '"$0" -m app.cli.main --version >&-', sys.executable],
        stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
