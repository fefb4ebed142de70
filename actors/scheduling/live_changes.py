"""What changes of a running engine's settings undo, and one change that does what several did."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def plain(key: str) -> str:
    """The key of a live setting without its section, which may be left out."""
    return key.removeprefix("scheduling.").removeprefix("slo.")


def cleared_by(changed: Iterable[str], order: str) -> dict[str, Any]:
    """What these changed settings reset, unless it is changed too: the options of a part do not
    apply to another one. order: that of the engine once it is changed."""
    changed = set(changed)
    parts = changed & {"policy", "order", "budget", "admission"}
    if "policy" in parts and order == "auto":
        parts.add("order")
    cleared: dict[str, Any] = {f"{part}_options": {} for part in sorted(parts)}
    return cleared | ({"token_budget": None} if "budget" in parts else {})


def merged(earlier: Mapping[str, Any], later: Mapping[str, Any], order: str) -> dict[str, Any]:
    """One change with the effect of two, one after the other; keys as in the YAML.

    A mere union would give the part that came later the options of the one before it, which an
    engine refuses. order: of an engine before them.
    """
    earlier, later = ({plain(key): v for key, v in each.items()} for each in (earlier, later))
    cleared = cleared_by(later, later.get("order", earlier.get("order", order)))
    return {key: v for key, v in earlier.items() if key not in cleared} | later
