"""What error messages call a setting, and the one that an unknown key may be meant to be."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, get_args

from actors.scheduling.config import SETTINGS
from app.api.http.keys import shown_key
from app.settings.schema import Settings, fields_of

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


# Of sections and values that must be mappings
_EXAMPLES = {
    "model": "{path: org/name}",
    "slo": "{tbt_ms: 100}",
    "api.api_keys": "{env:NAME: {}}",
    "listen": "127.0.0.1:8000",
}
# Keys of a Serve config, which those who know Serve may write among the settings
_OF_SERVE = frozenset({
    "applications", "autoscaling_config", "deployments", "graceful_shutdown_timeout_s",
    "http_options", "import_path", "max_ongoing_requests", "num_replicas", "proxy_location",
    "ray_actor_options", "route_prefix", "runtime_env", "user_config",
})  # fmt: skip
_NO_MAPPING = ("dataclass_type", "dict_type", "mapping_type", "model_attributes_type", "model_type")


def message_of(problem: ErrorDetails) -> str:
    """One of pydantic's problems with the settings, as a line that begins with the key."""
    key, message = dotted(problem["loc"]), problem["msg"].removeprefix("Value error, ")
    if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        message = f"unknown setting{suggestion(problem['loc'])}"
    elif problem["type"] in _NO_MAPPING:
        example = _EXAMPLES.get(key)
        message = (
            f"must be a mapping{f', such as {example}' if example else '; {} is an empty one'}"
        )
    elif key == "listen" and problem["type"].startswith("string_"):
        message = f"must be host:port, such as {_EXAMPLES[key]}, not {problem['input']!r}"
    return f"{key}: {message}"


def dotted(location: tuple[int | str, ...]) -> str:
    """What messages call a key; one of `api.api_keys` by its digest, since logs have no keys."""
    parts = [str(part) for part in location if part != "[key]"]
    if parts[:2] == ["api", "api_keys"]:
        parts[2:3] = map(shown_key, parts[2:3])
    return ".".join(parts) or "args"


def suggestion(location: tuple[int | str, ...]) -> str:
    """What to add to the error for an unknown key: the one it may be meant to be."""
    if len(location) == 1 and location[0] in _OF_SERVE:
        return "; it is one of Serve's, in a whole config (`legato config show` prints one)"
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
