"""`legato`: the command line. Each command's logic lives in the room it belongs to."""

from __future__ import annotations

import typer

from app.cli import serve

app = typer.Typer(
    name="legato",
    help="Serve language models whose tokens never stall.",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
)
serve.register(app)


@app.callback()
def root() -> None:
    """Serve language models whose tokens never stall."""


def main() -> None:
    app()
