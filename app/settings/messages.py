"""What error messages call a setting, and the one that an unknown key may be meant to be."""

from __future__ import annotations

import difflib
from typing import Any, get_args

from actors.scheduling.config import SETTINGS
from app.api.http.keys import shown_key
from app.settings.schema import Settings, fields_of


def dotted(location: tuple[int | str, ...]) -> str:
    """What messages call a key; one of `api.api_keys` by its digest, since logs have no keys."""
    parts = [str(part) for part in location if part != "[key]"]
    if parts[:2] == ["api", "api_keys"]:
        parts[2:3] = map(shown_key, parts[2:3])
    return ".".join(parts) or "args"


def suggestion(location: tuple[int | str, ...]) -> str:
    """What to add to the error for an unknown key: the one it may be meant to be."""
    section: Any = Settings
    for part in location[:-1]:
        inner = fields_of(section).get(str(part))
        if inner is None:  # inside a value, such as one key's limits
            return ""
        kinds = (inner.annotation, *get_args(inner.annotation))  # a section may be optional
        section = next(filter(fields_of, kinds), None)
    known = fields_of(section)
    close = difflib.get_close_matches(str(location[-1]), known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def in_section(message: str) -> str:
    """The message of a ConfigError, which begins with a key, with the key's section before it."""
    key = message.partition(":")[0]
    sections = {setting.key(name): setting.section for name, setting in SETTINGS.items()}
    return message if "." in key else f"{sections.get(key, 'scheduling')}.{message}"
