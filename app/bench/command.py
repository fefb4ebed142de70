"""Every benchmark and its command, listed in one place.

A module is imported when its command is run or its help is shown: `legato --help` then waits
neither for torch nor for Ray.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, ClassVar

import typer

from app.bench.report import MeasurementError
from app.settings.model_folder import SettingsError
from app.terminal import WRONG_USAGE, SuggestingGroup, fail, in_paragraphs

# Command -> module of app.bench whose function `command` it runs.
BENCHES: Mapping[str, str] = {
    "serve": "load.serve",
    "stall": "load.stall",
    "quote": "load.quote",
    "overload": "load.overload",
    "classes": "load.classes",
    "shift": "load.shift",
    "batch": "load.batch",
    "fuzz": "chaos.fuzz",
    "connections": "chaos.connections",
    "recovery": "chaos.recovery",
    "soak": "chaos.soak",
    "startup": "startup",
    "compare": "compare",
    "engine": "engine.steps",
    "overhead": "engine.overhead",
    "planning": "engine.planning",
    "speculation": "engine.speculation",
    "adapters": "engine.adapters",
    "policies": "studies.policies",
    "budgets": "studies.budgets",
    "returning": "studies.returning",
    "validate": "studies.validate",
    "bubbles": "studies.bubbles",
    "scaling": "studies.scaling",
    "routing": "studies.routing",
    "routers": "studies.routers",
    "ways": "studies.ways",
    "live-ways": "studies.live_ways",
    "handover": "studies.handover",
    "simulator": "studies.simulator",
    "accuracy": "studies.accuracy",
    "gpu": "gpu.command",
    "compile": "gpu.compile_check",
}
KERNELS: Mapping[str, str] = {"linear": "kernels.linear", "attention": "kernels.attention"}
TOP_LEVEL: Mapping[str, str] = {
    "capacity": "load.capacity",
    "profile": "engine.profile",
    "chaos": "chaos.command",
}


def load(name: str, module: str) -> typer.Typer:
    """A Typer with this one command; errors of measuring and of settings are its message."""
    command: Callable[..., None] = import_module(f"app.bench.{module}").command

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except MeasurementError as error:
            fail(error)
        except SettingsError as error:
            fail(error, code=WRONG_USAGE)

    single = typer.Typer(add_completion=False, rich_markup_mode="rich")
    single.command(name)(run)
    return single


class _LazyGroup(SuggestingGroup):
    modules: ClassVar[Mapping[str, str]] = {}

    def list_commands(self, ctx: Any) -> list[str]:
        return [*self.modules, *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in self.modules:
            return in_paragraphs(typer.main.get_command(load(cmd_name, self.modules[cmd_name])))
        return super().get_command(ctx, cmd_name)


class _Benches(_LazyGroup):
    modules = BENCHES


class _Kernels(_LazyGroup):
    modules = KERNELS


def register(app: typer.Typer) -> None:
    """`legato bench ...`, and the commands of `TOP_LEVEL`."""
    bench = typer.Typer(
        cls=_Benches, help="Measure: the engine, the kernels, a running server.",
        no_args_is_help=True,
    )  # fmt: skip
    kernels = typer.Typer(
        cls=_Kernels, help="CPU kernels one by one, against bandwidth and peak.",
        no_args_is_help=True,
    )  # fmt: skip
    bench.add_typer(kernels, name="kernels")
    app.add_typer(bench, name="bench")
    for name, module in TOP_LEVEL.items():
        app.registered_commands += load(name, module).registered_commands
