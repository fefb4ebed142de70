"""Builds a policy, order, budget or admission from its name.

Each package holds one table, name -> what builds it. A new part is one class and one row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar, get_type_hints

from actors.scheduling.config import KINDS, ConfigError
from actors.scheduling.setting import fits, in_words, is_plain

_Part = TypeVar("_Part")
_Function = TypeVar("_Function", bound=Callable[..., Any])

_passed_on: dict[Callable[..., Any], tuple[Callable[..., Any], ...]] = {}


def options_of(*parts: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """Marks a function that builds a part and passes its options on to these."""

    def mark(function: _Function) -> _Function:
        _passed_on[function] = parts
        return function

    return mark


def build_part(
    setting: str,
    name: str,
    known: Mapping[str, Callable[..., _Part]],
    options: Mapping[str, Any],
    *arguments: Any,
) -> _Part:
    """`known[name](*arguments, **options)`.

    Raises ConfigError as `check_part`, and for an option that the part refuses (TypeError). So a
    live change cannot fail half-way because of an option.
    """
    check_part(setting, name, known, options)
    try:
        return known[name](*arguments, **options)
    except TypeError as error:
        raise ConfigError(f"{setting}_options", str(error)) from error


def check_part(
    setting: str,
    name: str,
    known: Mapping[str, Callable[..., Any]],
    options: Mapping[str, Any],
) -> None:
    """Raises ConfigError naming `setting` for an unknown name, and `<setting>_options` for an
    option that is unknown or has a value of the wrong type."""
    if name not in known:
        raise ConfigError(setting, f"unknown {name!r}; known: {', '.join(sorted(known))}")
    declared = _declared(known[name])
    for option, value in options.items():
        if option not in declared:
            there = f"{name} has {', '.join(sorted(declared)) or 'no options'}"
            raise ConfigError(f"{setting}_options", f"unknown {option!r}; {there}")
        if not fits(value, declared[option]):
            message = f"{option} must be {in_words(declared[option])}, not {value!r}"
            raise ConfigError(f"{setting}_options", message)


@cache
def _declared(part: Callable[..., Any]) -> Mapping[str, Any]:
    """Types of a part's options: of its class, without what is a setting of its own, and of the
    function that builds it."""
    made = getattr(part, "__self__", part)
    hints: dict[str, Any] = {}
    if isinstance(made, type):
        of_class = get_type_hints(made.__init__)  # type: ignore[misc]
        hints = {name: kind for name, kind in of_class.items() if name not in KINDS}
    for other in _passed_on.get(part, ()):
        hints |= {name: kind for name, kind in _declared(other).items() if name not in KINDS}
    if not isinstance(part, type):
        hints |= get_type_hints(part)
    hints.pop("return", None)
    return {n: kind for n, kind in hints.items() if is_plain(kind) and not n.startswith("_")}


def within(low: float, high: float, **options: float | None) -> None:
    """Raise TypeError for the first option outside [low, high]; None is allowed."""
    for name, value in options.items():
        if value is not None and not low <= value <= high:
            raise TypeError(f"{name} must lie between {low:g} and {high:g}, not {value!r}")
