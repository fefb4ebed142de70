"""Shared by the benchmarks' commands: options, tables, expected durations."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console, ConsoleDimensions, JustifyMethod
from rich.progress import track
from rich.table import Table

_PIPE_WIDTH = 10_000


class _Output(Console):
    """As wide as needed in a pipe or a file, where nothing is cut or wrapped, unless COLUMNS is
    set."""

    @property
    def size(self) -> ConsoleDimensions:
        size = super().size
        if self.is_terminal or os.environ.get("COLUMNS", "").isdigit():
            return size
        return ConsoleDimensions(_PIPE_WIDTH, size.height)

    @size.setter
    def size(self, new_size: tuple[int, int]) -> None:
        self._width, self._height = new_size


# Results, as tables or JSON, go to the standard output; progress and messages to the other.
output = _Output(highlight=False)
console = Console(stderr=True, highlight=False)

Json = Annotated[bool, typer.Option("--json", help="Print the JSON report.")]
Out = Annotated[
    Path | None, typer.Option(dir_okay=False, help="Write the JSON report to this file.")
]

Item = TypeVar("Item")
Number = TypeVar("Number", int, float)


def numbers(text: str, option: str, kind: Callable[[str], Number]) -> list[Number]:
    """An option's comma-separated numbers, read by `int` or `float`.

    Raises typer.BadParameter naming the option.
    """
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        whole = "whole " if kind is int else ""
        raise typer.BadParameter(
            f"{text!r}: use {whole}numbers, separated by commas", param_hint=option
        ) from None


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, num_words: int = 1
) -> Table:
    """num_words: how many leading columns hold words; the rest hold numbers, set to the right."""
    made = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        justify: JustifyMethod = "left" if number < num_words else "right"
        made.add_column(column, justify=justify, overflow="fold")  # whole even if narrow
    for row in rows:
        made.add_row(*row)
    return made


def progress(items: Sequence[Item], title: str) -> Iterable[Item]:
    """The items, with a bar that says how many are done and how long the rest will take."""
    return track(items, title, console=console, transient=True, disable=not console.is_terminal)


def duration(seconds: float) -> str:
    """
    >>> duration(42), duration(400)
    ('42 s', '7 min')
    """
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def say_duration(least_s: float, most_s: float, what: str) -> None:
    """Announce a long measurement and its expected duration."""
    least, most = duration(least_s), duration(most_s)
    console.print(f"{what}: about {most if least == most else f'{least} to {most}'}")
