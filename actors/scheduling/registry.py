"""Builds a policy, order, budget or admission from its name.

Each package holds one table, name -> what builds it. A new part is one class and one row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar, get_type_hints

from actors.scheduling.config import ConfigError
from actors.scheduling.setting import fits, in_words

_Part = TypeVar("_Part")


def build_part(
    setting: str,
    name: str,
    known: Mapping[str, Callable[..., _Part]],
    options: Mapping[str, Any],
    *arguments: Any,
) -> _Part:
    """`known[name](*arguments, **options)`.

    Raises ConfigError naming `setting` for an unknown name, and `<setting>_options` for an option
    that is unknown, has a value of the wrong type, or is refused by the part (TypeError). So a live
    change cannot fail half-way because of an option.
    """
    if name not in known:
        raise ConfigError(setting, f"unknown {name!r}; known: {', '.join(sorted(known))}")
    declared = _declared(known[name])
    for option, value in options.items():
        if option in declared and not fits(value, declared[option]):
            message = f"{option} must be {in_words(declared[option])}, not {value!r}"
            raise ConfigError(f"{setting}_options", message)
    try:
        return known[name](*arguments, **options)
    except TypeError as error:
        raise ConfigError(f"{setting}_options", str(error)) from error


@cache
def _declared(part: Callable[..., Any]) -> Mapping[str, Any]:
    """Types of a part's options: of its class, or of the function that builds it."""
    made = getattr(part, "__self__", part)
    hints = get_type_hints(made.__init__) if isinstance(made, type) else {}  # type: ignore[misc]
    return hints if isinstance(part, type) else hints | get_type_hints(part)


def within(low: float, high: float, **options: float | None) -> None:
    """Raise TypeError for the first option outside [low, high]; None is allowed."""
    for name, value in options.items():
        if value is not None and not low <= value <= high:
            raise TypeError(f"{name} must lie between {low:g} and {high:g}, not {value!r}")
