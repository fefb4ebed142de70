"""`legato`: the command line. Each command's logic lives in the room it belongs to."""

from __future__ import annotations

import typer

from app.bench import command as bench
from app.cli import config, records, serve, talk
from app.simulate import command as simulate

app = typer.Typer(
    name="legato",
    help="Serve language models whose tokens never stall.",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
)
serve.register(app)
talk.register(app)
config.register(app)
simulate.register(app)
bench.register(app)
records.register(app)


@app.callback()
def root() -> None:
    """Serve language models whose tokens never stall."""


def main() -> None:
    app()


if __name__ == "__main__":
    main()
