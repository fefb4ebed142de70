"""`legato`: the command line. Each command's logic is in its own package."""

from __future__ import annotations

from typing import Annotated

import typer

from app.bench import command as bench
from app.cli import batch, config, models, records, serve, status, talk
from app.paths import version
from app.simulate import command as simulate

app = typer.Typer(
    name="legato",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
)
serve.register(app)
talk.register(app)
status.register(app)
batch.register(app)
config.register(app)
models.register(app)
simulate.register(app)
bench.register(app)
records.register(app)

PANELS = {
    "Serve and talk": (
        "serve",
        "status",
        "chat",
        "generate",
        "batch",
        "config",
        "models",
        "check",
    ),
    "Simulate and measure": ("simulate", "capacity", "profile", "bench", "chaos"),
    "Logs of a run": ("explain", "plot", "trace", "replay"),
}
_panel_of = {name: panel for panel, names in PANELS.items() for name in names}
for _command in app.registered_commands:
    _command.rich_help_panel = _panel_of[str(_command.name)]
for _group in app.registered_groups:
    _group.rich_help_panel = _panel_of[str(_group.name)]


def _say_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"legato {version()}")
        raise typer.Exit


@app.callback()
def root(
    _: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_say_version, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Serve language models whose tokens never stall.

    [bold]legato serve[/] serves the demo model, [bold]legato serve FOLDER[/] your own;
    [bold]legato chat[/] in another terminal talks to it.
    """


def main() -> None:
    app()


if __name__ == "__main__":
    main()
