"""`legato`: the command line. Each command's logic lives in the room it belongs to."""

from __future__ import annotations

import typer

from app.bench import compare
from app.bench.engine import overhead, profile
from app.bench.engine import steps as engine
from app.bench.gpu import command as gpu
from app.bench.load import generator as load
from app.bench.studies import accuracy, budgets, policies, validate
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
bench = typer.Typer(
    help="Measure: the engine, the kernels, a running server.", no_args_is_help=True
)
app.add_typer(bench, name="bench")
serve.register(app)
talk.register(app)
config.register(app)
profile.register(app)
simulate.register(app)
records.register(app)
engine.register(bench)
gpu.register(bench)
accuracy.register(bench)
compare.register(bench)
overhead.register(bench)
load.register(bench, app)
policies.register(bench)
budgets.register(bench)
validate.register(bench)


@app.callback()
def root() -> None:
    """Serve language models whose tokens never stall."""


def main() -> None:
    app()


if __name__ == "__main__":
    main()
