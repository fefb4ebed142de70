"""Ends a failed command with one line that names the cause."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import typer
from rich.console import Console
from typer.core import TyperGroup


class LastingConsole(Console):
    """Says no more once nobody reads it, where rich's own would end the command: a server goes on
    without `head` or `tee`, and drains after its terminal has hung up."""

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError:  # rich knows broken pipes alone
            self.on_broken_pipe()

    has_no_reader = False  # of any

    def on_broken_pipe(self) -> None:
        self.quiet = True
        LastingConsole.has_no_reader = True
        _write_nowhere(self.file.fileno())


# soft_wrap: a message that names a file or an address stays in one piece, also in a log.
console = LastingConsole(stderr=True, highlight=False, soft_wrap=True)

FAILED, WRONG_USAGE = 1, 2
CUT_OFF = 128 + 13  # as a shell says it of what SIGPIPE has ended
_STDOUT = 1


def end_with_reader(command: Callable[[], None]) -> None:
    """Run a command, which raises SystemExit. Where nobody reads its output to the end, as behind
    `head`, it ends without a word, and that is not told as a failure of its own."""
    stream, file = sys.stdout, _identity(_STDOUT)
    if stream is None:  # closed before the start: there never was a reader
        command()
        return
    end: SystemExit | None = None
    try:
        command()
    except SystemExit as raised:
        end = raised
    try:
        stream.flush()
        is_cut = sys.stdout is not stream  # by Typer
        if not LastingConsole.has_no_reader:
            is_cut |= _identity(_STDOUT) != file  # by rich
    except BrokenPipeError:
        is_cut = not LastingConsole.has_no_reader
    if is_cut:
        _write_nowhere(_STDOUT)
        raise SystemExit(CUT_OFF)
    if end is not None:
        raise end


def _identity(descriptor: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _write_nowhere(descriptor: int) -> None:
    """What is left in its buffer is written at the end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def print_error(message: object) -> None:
    """One line on standard error; brackets in the message are printed as they are."""
    console.print("[red]error:[/]", end=" ")
    console.print(str(message), markup=False)


def fail(message: object, hint: str | None = None, code: int = FAILED) -> NoReturn:
    """Print the error and a hint, and exit with this status."""
    print_error(message)
    if hint is not None:
        console.print(hint, markup=False)
    raise typer.Exit(code) from None


class SuggestingGroup(TyperGroup):
    """Names the command that may be meant: Typer's own group knows none that is loaded lazily."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        known = self.list_commands(ctx)
        close = difflib.get_close_matches(args[0], known, n=1)
        if close and args[0] not in known and not ctx.resilient_parsing:
            ctx.fail(f"No such command '{args[0]}'. Did you mean '{close[0]}'?")
        return super().resolve_command(ctx, args)


def in_paragraphs(command: Any) -> Any:
    """This command, its help and that of commands in it wrapped to the terminal: Typer keeps a
    docstring's own ends of lines in all paragraphs but the first."""
    if command.help is not None:
        command.help = re.sub(r"(?<!\n)\n(?!\n)", " ", command.help)
    for one in getattr(command, "commands", {}).values():
        in_paragraphs(one)
    return command
