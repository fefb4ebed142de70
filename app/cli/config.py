"""`legato config check|show|reference`: what a YAML means, before anything is started."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from rich.console import Console

from app.cli.serve import load_config, place
from app.settings import Settings, SettingsError, parse, resolve

_err = Console(stderr=True, highlight=False)
config = typer.Typer(help="Check and explain configurations.", no_args_is_help=True)
Target = Annotated[Path, typer.Argument(help="A Serve config (YAML) or a model folder.")]


def _applications(target: Path) -> list[dict[str, Any]]:
    try:
        config = load_config(target)
        place(config, None, None)
        return list(config["applications"])
    except SettingsError as error:
        _err.print(f"[red]error:[/] {error}")
        raise typer.Exit(2) from None


@config.command()
def check(target: Target) -> None:
    """Validate a config as `serve` would; exit 2 with the key at fault."""
    for application in _applications(target):
        try:
            resolve(parse(application.get("args") or {}))
        except SettingsError as error:
            _err.print(f"[red]error:[/] {target}: {error}")
            raise typer.Exit(2) from None
    typer.echo(f"{target}: ok")


@config.command()
def show(target: Target) -> None:
    """Print the resolved engine settings (JSON), defaults filled in."""
    for application in _applications(target):
        try:
            resolved = resolve(parse(application.get("args") or {}))
        except SettingsError as error:
            _err.print(f"[red]error:[/] {target}: {error}")
            raise typer.Exit(2) from None
        typer.echo(json.dumps(dataclasses.asdict(resolved), indent=2, default=str))


@config.command()
def reference() -> None:
    """Print the reference of every setting as Markdown (configs/README.md is made of it)."""
    typer.echo("\n".join([*_HEAD, *_lines(Settings, "")]))


_HEAD = ("| key | type | default | meaning |", "|---|---|---|---|")


def _lines(section: Any, prefix: str) -> list[str]:
    """The rows of a section's own keys, then its sections, each under a heading."""
    lines: list[str] = []
    sections: list[str] = []
    fields: dict[str, FieldInfo] = section.model_fields
    for name, field in fields.items():
        nested: Any = field.annotation
        if hasattr(nested, "model_fields"):
            sections += ["", f"### `{name}`", "", *_HEAD, *_lines(nested, f"{prefix}{name}.")]
        else:
            kind = _kind(nested)
            default = "required" if field.is_required() else f"`{field.get_default()!r}`"
            if dataclasses.is_dataclass(nested):
                default = "see app/api/README.md"
            lines.append(f"| `{prefix}{name}` | {kind} | {default} | {field.description or ''} |")
    return lines + sections


def _kind(annotation: Any) -> str:
    """How a person would say the type: choices by name, optional ones as such."""
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    parts = [part for part in get_args(annotation) if part is not type(None)]
    if type(None) in get_args(annotation):
        return f"{_kind(parts[0])}, optional"
    return getattr(annotation, "__name__", str(annotation))


def register(app: typer.Typer) -> None:
    app.add_typer(config, name="config")
