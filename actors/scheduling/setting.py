"""Declaration of a setting: a dataclass field with metadata for its user."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Any, get_args, get_origin


@dataclass(frozen=True, slots=True)
class Setting:
    """The metadata of a field of `SchedulerConfig`.

    called: its name in the YAML, where that is not the field's.
    section: its section in the YAML; `hidden` for fields derived from other settings.
    milliseconds: the YAML value is in ms, as its name says; the field holds seconds.
    file: the YAML names a file; the field holds its content.
    live: it may change while the engine runs.
    at_least, at_most, above, below, choices: allowed values, besides null.
    """

    description: str
    called: str = ""
    section: str = "scheduling"
    hidden: bool = False
    live: bool = False
    milliseconds: bool = False
    file: bool = False
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()

    def key(self, name: str) -> str:
        """The setting's name in the YAML, for a field called `name`."""
        if self.called:
            return self.called
        return name.removesuffix("_s") + "_ms" if self.milliseconds else name

    def from_yaml(self, value: Any) -> Any:
        """The field's value for one in the YAML."""
        return value / 1000 if self.milliseconds and value is not None else value

    def in_yaml(self, value: Any) -> Any:
        """The inverse of `from_yaml`."""
        return value * 1000 if self.milliseconds and value is not None else value

    def problem(self, value: Any) -> str | None:
        """An error message for a value of the right type; None if it is valid."""
        if value is None:
            return None
        if self.choices and value not in self.choices:
            return f"unknown {value!r}; known: {', '.join(sorted(self.choices))}"
        if isinstance(value, float) and not math.isfinite(value):
            return f"must be finite, not {value!r}"
        shown = f"{1000 * value:g}" if self.milliseconds else repr(value)
        if self.at_least is not None and not value >= self.at_least:
            return f"must be at least {self.at_least}, not {shown}"
        if self.at_most is not None and not value <= self.at_most:
            return f"must be at most {self.at_most}, not {shown}"
        if self.above is not None and not value > self.above:
            return f"must be above {self.above}, not {shown}"
        if self.below is not None and not value < self.below:
            return f"must be below {self.below}, not {shown}"
        return None


def setting(default: Any, description: str, **options: Any) -> Any:
    """A field of `SchedulerConfig`; `options` are those of `Setting`."""
    metadata = {"setting": Setting(description, **options)}
    if isinstance(default, Mapping):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def _kinds(declared: Any) -> tuple[Any, ...]:
    return get_args(declared) if isinstance(declared, UnionType) else (declared,)


def is_plain(declared: Any) -> bool:
    """Whether a declared type is one that a value from outside can have."""
    plain = (int, float, str, bool, NoneType, Mapping)
    return all((get_origin(kind) or kind) in plain for kind in _kinds(declared))


def fits(value: Any, declared: Any) -> bool:
    """Whether a value from outside has the declared type of a field."""
    if isinstance(value, bool):
        return declared is bool
    kinds = [
        int | float if kind is float else get_origin(kind) or kind for kind in _kinds(declared)
    ]
    return isinstance(value, tuple(kinds))


def in_words(declared: Any) -> str:
    """The declared type of a field, for error messages."""
    words = {int: "an integer", float: "a number", str: "a name", bool: "true or false"}
    words[NoneType] = "null"
    return " or ".join(words.get(kind, "a mapping") for kind in _kinds(declared))
