"""`legato status`: the state of a running server and of each engine."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import httpx
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from app.bench.load.client import server_root
from app.cli.talk import DEFAULT_URL, Key, Model, Url, bearer, refused, unreachable
from app.terminal import fail

_NAME_WIDTH = 15  # of a replica's engine: Serve's eight characters, a dot, six of its own


def register(app: typer.Typer) -> None:
    app.command("status")(status)


def status(
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    model: Model = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Show the state of a running server: requests, memory, and the engines of a fleet; of every
    model it serves, or of one.

    With --json, several models are a list."""
    root = server_root(url)
    each = [_ask(root, api_key, model)]
    if model is None:
        each += [_ask(root, api_key, name) for name in each[0].get("models", ())[1:]]
    if not any("num_blocks" in found for found in each):
        fail(f"{root}: {each[0]['reason']}")
    if as_json:
        typer.echo(json.dumps(each[0] if len(each) == 1 else each))
        return
    out = Console(file=sys.stdout, highlight=False)
    for found in each:
        if len(each) > 1:
            out.print(found["model"], style="bold", markup=False)
        if "num_blocks" in found:
            _show(out, found)
        else:
            out.print(f"{found['reason']}\n", markup=False)


def _show(out: Console, found: dict[str, Any]) -> None:
    """One model."""
    out.print(_engines(found))
    if fleet := found.get("fleet"):
        lost, moved = fleet["num_engines_lost"], fleet["num_moves"]
        inexact = fleet["num_inexact_moves"]
        out.print(
            f"{lost} engine{'s' * (lost != 1)} lost, {moved} stream{'s' * (moved != 1)} moved"
            + (f" ({fleet['num_balanced']} for balance)" if fleet["num_balanced"] else "")
            + (f", {inexact} of them inexactly" if inexact else "")
        )


def _ask(root: str, key: str | None, model: str | None) -> dict[str, Any]:
    """A model's status, or the `reason` why it has none; all other failures end the command."""
    try:
        params = {} if model is None else {"model": model}
        answer = httpx.get(
            f"{root}/console/status", params=params, headers=bearer(key), timeout=15.0
        )
        found = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ImportError) as error:  # of a SOCKS proxy
        unreachable(root, error)
    except ValueError:
        fail(f"{root} is not a Legato server")
    if not isinstance(found, dict) or (answer.status_code != 200 and "reason" not in found):
        refused(root, answer)
    return found


def _engines(found: dict[str, Any]) -> Table:
    """Of 80 columns, in which no number is cut, nor the name of a replica's engine."""
    engines = found.get("engines")
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 0), show_edge=False)
    table.add_column("engine", overflow="fold", min_width=_NAME_WIDTH)
    for head in ("role", "state") if engines else ("state",):
        table.add_column(head, no_wrap=True)
    for head in ("running", "waiting", "KV", "slack", "budget", "tokens/s"):
        table.add_column(head, no_wrap=True, justify="right")
    for engine in engines or [_alone(found)]:
        names = [str(engine["id"]), *([str(engine.get("role", "–"))] if engines else [])]
        if "state" not in engine:  # it has only just joined
            table.add_row(*names, "starting", *["–"] * 6)
            continue
        slack_s = engine.get("least_slack_s")
        used = 1.0 - engine["num_free_blocks"] / engine["num_blocks"]
        table.add_row(
            *names,
            str(engine["state"]),
            str(engine["num_running"]),
            str(engine["num_waiting"]),
            f"{used:.0%}",
            "–" if slack_s is None else f"{1000 * slack_s:.0f} ms",
            # What they were in the last step says nothing of an engine at rest.
            str(engine.get("step_budget") or "–") if engine["num_running"] else "–",
            f"{engine['tokens_per_s']:.0f}" if engine["num_running"] else "–",
        )
    return table


def _alone(found: dict[str, Any]) -> dict[str, Any]:
    """A lone engine in the form of a fleet's."""
    return {
        **found,
        "id": found["model"],
        "state": "serving" if found["ready"] else "starting",
        "num_running": found["num_decoding"] + found["num_prefilling"],
    }
