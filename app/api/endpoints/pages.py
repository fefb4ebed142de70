"""Lists in pages, as OpenAI's API gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from urllib.parse import parse_qs

from app.api.http.call import Call
from app.api.http.errors import invalid, unknown_parameter


class Shown(Protocol):
    @property
    def id(self) -> str: ...

    def shown(self) -> dict[str, Any]: ...


def parameters(call: Call, known: Sequence[str]) -> Mapping[str, str]:
    """The query's parameters; raises 400 for one that is not known or given twice."""
    query = call.scope.get("query_string", b"").decode("latin-1")
    try:
        given = parse_qs(query, keep_blank_values=True, max_num_fields=2 * len(known))
    except ValueError:
        raise invalid("Too many parameters.") from None
    for name, values in given.items():
        if name not in known:
            raise unknown_parameter(name[:64], known)
        if len(values) > 1:
            raise invalid(f"'{name}' is given twice.", name)
    return {name: values[0] for name, values in given.items()}


def page(found: Sequence[Shown], given: Mapping[str, str], limit: int, most: int) -> dict[str, Any]:
    """One page of objects, which come oldest first. given: `limit`, `order` and `after`.

    limit: without one in the request. most: the highest that is allowed.
    """
    order = given.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid("Invalid 'order': 'asc' or 'desc' is wanted.", "order")
    wanted = given.get("limit", str(limit))
    if not (wanted.isascii() and wanted.isdigit() and len(wanted) < 10) or not (
        1 <= int(wanted) <= most
    ):
        raise invalid(f"Invalid 'limit': a number from 1 to {most} is wanted.", "limit")
    ordered = list(found) if order == "asc" else list(reversed(found))
    after = given.get("after")
    if after is not None:
        places = [place for place, one in enumerate(ordered) if one.id == after]
        if not places:
            raise invalid(f"Nothing here has the id '{after[:64]}'.", "after")
        ordered = ordered[places[0] + 1 :]
    shown = [one.shown() for one in ordered[: int(wanted)]]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(ordered) > len(shown),
    }
