"""`legato`: the command line. Each command's logic is in its own package.

It is imported when the command is run or all are listed: a server's start does not wait for what
others need.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Annotated, Any

try:
    import typer

    from app.paths import version
    from app.terminal import SuggestingGroup, end_with_reader, in_paragraphs
except KeyboardInterrupt:  # later it is typer that ends the command
    raise SystemExit(130) from None

# Panel of the help -> its commands, each with the module that registers it.
PANELS: Mapping[str, Mapping[str, str]] = {
    "Serve and talk": {
        "serve": "app.cli.serve",
        "status": "app.cli.status",
        "chat": "app.cli.talk",
        "generate": "app.cli.talk",
        "batch": "app.cli.batch",
        "config": "app.cli.config",
        "models": "app.cli.models",
        "check": "app.cli.models",
    },
    "Simulate and measure": {
        "simulate": "app.simulate.command",
        "capacity": "app.bench.command",
        "profile": "app.bench.command",
        "bench": "app.bench.command",
        "chaos": "app.bench.command",
    },
    "Logs of a run": dict.fromkeys(("explain", "plot", "trace", "replay"), "app.cli.records"),
}
_PROXIES = [
    name for kind in ("http_proxy", "https_proxy", "all_proxy") for name in (kind, kind.upper())
]
_panel_of = {name: panel for panel, names in PANELS.items() for name in names}


class _Commands(SuggestingGroup):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        in_paragraphs(self)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_panel_of)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        panel = _panel_of.get(cmd_name)
        if panel is None:
            return None
        of_module = typer.Typer(rich_markup_mode="rich")
        import_module(PANELS[panel][cmd_name]).register(of_module)
        command = in_paragraphs(typer.main.get_group(of_module).commands[cmd_name])
        command.rich_help_panel = panel
        return command


app = typer.Typer(
    cls=_Commands,
    name="legato",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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

    Exit status: 0 done; 1 failed while running; 141 its output was not read to the end; 2 wrong
    usage, or a setting that will not do, whenever that was found.
    """
    reach_this_machine_directly()


def reach_this_machine_directly() -> None:
    """A proxy of the environment is for other machines: asked for this one, it answers for itself,
    and a server that runs would never be found. Holds for the processes that a command starts."""
    if not any(os.environ.get(name) for name in _PROXIES):
        return
    left_out = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if "*" not in [part.strip() for part in left_out.split(",")]:
        left_out = ",".join([*filter(None, [left_out]), "localhost", "127.0.0.1", "::1", "0.0.0.0"])
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = left_out


def main() -> None:
    end_with_reader(app)


if __name__ == "__main__":
    main()
