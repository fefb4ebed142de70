"""What `legato serve` prints once the server answers."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import httpx

from actors.calibration.outlook import CHAT_OUTPUT, CHAT_PROMPT
from app.api.http.keys import read_key
from app.cli.talk import bearer
from app.settings.models import parse_each, resolve_each, served_name
from app.settings.schema import Settings
from app.terminal import LastingConsole

_BELOW = "\n" + 11 * " "  # a terminal may have 80 columns
_PARTS = ("imports", "Ray", "Serve", "model")


def show_banner(args: dict[str, Any], address: str, ends_s: list[float]) -> None:
    """On standard output, because the user may want to copy from it. args, address: of one
    application. ends_s: see `ready_in`."""
    each = parse_each(args)
    name = served_name(each[0])
    message = {"role": "user", "content": "Hello!"}
    body = json.dumps({"model": name, "messages": [message], "stream": True})
    out = LastingConsole(file=sys.stdout, highlight=False, soft_wrap=True)
    models = ", ".join(name for one in each for name in (served_name(one), *one.adapter_names))
    out.print(
        f"\n[bold]Legato[/] serves [bold]{models}[/] at [bold]{address}[/]  ({ready_in(ends_s)})"
    )
    out.print(f"  console  {address}/")
    with _client(address, each[0]) as client:
        for one, resolved in zip(each, resolve_each(args), strict=True):
            named = served_name(one) if len(each) > 1 else None
            of_it, status = f"of {named}: " if named else "", _status(client, named)
            longest, wanted = status.get("max_model_len"), resolved.scheduler.max_model_len
            if longest is not None and longest < wanted:
                out.print(
                    f"  context  {of_it}{longest} tokens, not the model's {wanted}:"
                    f"{_BELOW}the KV cache holds no more (see kv.memory_gib)"
                )
            if capacity := _capacity(status, one):
                out.print(f"  capacity {of_it}{capacity}")
    out.print(f"  try      curl -N {address}/v1/chat/completions \\")
    out.print("             -H 'Content-Type: application/json' \\")
    if each[0].api.api_keys:
        out.print('             -H "Authorization: Bearer $LEGATO_API_KEY" \\')
    out.print(f"             -d '{body}'", markup=False)
    out.print("  stop     Ctrl-C\n")
    sys.stdout.flush()


def ready_in(ends_s: Sequence[float]) -> str:
    """The time that a start took, and its parts. ends_s: seconds after which all was imported, Ray
    ran, Serve had placed the replicas, and the model answered.

    >>> ready_in([1.2, 3.1, 7.9, 14.0])
    'ready in 14.0 s: imports 1.2, Ray 1.9, Serve 4.8, model 6.1'
    """
    each_s = (end_s - begin_s for begin_s, end_s in pairwise([0.0, *ends_s]))
    parts = ", ".join(f"{part} {s:.1f}" for part, s in zip(_PARTS, each_s, strict=True))
    return f"ready in {ends_s[-1]:.1f} s: {parts}"


def _client(address: str, settings: Settings) -> httpx.Client:
    # Of one that is written as its digest, only its owner has the key.
    keys = [read_key(w) for w in settings.api.api_keys if not w.strip().startswith("sha256:")]
    headers = bearer(keys[0] if keys else None)
    return httpx.Client(base_url=address, headers=headers, timeout=2.0, trust_env=False)


def _status(client: httpx.Client, name: str | None) -> dict[str, Any]:
    """Of a model, by its name where there are several; empty where it does not answer."""
    try:
        query = {"model": name} if name else {}
        found = client.get("/console/status", params=query).json()
    except (httpx.HTTPError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _capacity(status: dict[str, Any], settings: Settings) -> str | None:
    """The cost model's prediction for the objective, if there are both."""
    found = status.get("outlook")
    if not found:
        return None
    wanted_ms: float | None = settings.slo.tbt_ms  # type: ignore[attr-defined]
    tbt_ms = 1000 * found["tbt_s"]
    short = wanted_ms is not None and tbt_ms > wanted_ms
    lines = [f"{wanted_ms:g} ms are less than a token takes here;"] if short else []
    lines.append(f"{tbt_ms:.4g} ms between tokens: {found['num_tokens']} tokens an iteration")
    if (status.get("max_model_len") or math.inf) >= CHAT_PROMPT + CHAT_OUTPUT:
        lines[-1] += ","
        lines.append(
            f"about {found['chat_qps']:.2g} requests/s of chat ({CHAT_PROMPT} tokens in, "
            f"{CHAT_OUTPUT} out)"
        )
    return _BELOW.join(lines)
