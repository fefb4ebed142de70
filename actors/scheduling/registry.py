"""How the name of a policy, order, budget or admission becomes the part.

Each room holds one table, name -> what builds it. A new part is one class and one row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from actors.scheduling.config import ConfigError

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
    that the part does not have or whose value it refuses (TypeError).
    """
    if name not in known:
        raise ConfigError(setting, f"unknown {name!r}; known: {', '.join(sorted(known))}")
    try:
        return known[name](*arguments, **options)
    except TypeError as error:
        raise ConfigError(f"{setting}_options", str(error)) from error
