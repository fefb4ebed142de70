"""The shapes of a Serve config outside `args`, as far as this package reads them before Serve."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from app.settings.model_folder import SettingsError


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_MAPPING, _LIST, _TEXT, _WHOLE = "a mapping", "a list", "text", "a whole number"
_REPLICAS, _SECONDS = "a whole number or auto", "a number"
_FITS: Mapping[str, Callable[[Any], bool]] = {
    _MAPPING: lambda value: isinstance(value, dict),
    _LIST: lambda value: isinstance(value, list),
    _TEXT: lambda value: isinstance(value, str) and value != "",
    _WHOLE: _is_whole,
    _REPLICAS: lambda value: _is_whole(value) or value == "auto",
    _SECONDS: lambda value: _is_whole(value) or isinstance(value, float),
}
_APPLICATION = {"import_path": _TEXT, "args": _MAPPING, "deployments": _LIST}
_DEPLOYMENT = {
    "name": _TEXT,
    "num_replicas": _REPLICAS,
    "autoscaling_config": _MAPPING,
    "graceful_shutdown_timeout_s": _SECONDS,
}
_SCALED = {"min_replicas": _WHOLE, "max_replicas": _WHOLE}


def check_shapes(config: Mapping[str, Any]) -> None:
    """Raises SettingsError naming a key whose value is of another kind. What else is wrong Serve
    says, whose import takes seconds."""
    _check("", config, {"http_options": _MAPPING, "applications": _LIST})
    _check("http_options.", config.get("http_options") or {}, {"host": _TEXT, "port": _WHOLE})
    for number, application in enumerate(config["applications"]):
        where = f"applications.{number}"
        _check_kind(where, application, _MAPPING)
        _check(f"{where}.", application, _APPLICATION)
        for place, deployment in enumerate(application.get("deployments") or []):
            of_it = f"{where}.deployments.{place}"
            _check_kind(of_it, deployment, _MAPPING)
            if deployment.get("name") is None:
                raise SettingsError(f"{of_it}: lacks `name`")
            _check(f"{of_it}.", deployment, _DEPLOYMENT)
            scaled = deployment.get("autoscaling_config") or {}
            _check(f"{of_it}.autoscaling_config.", scaled, _SCALED)


def _check(where: str, given: Mapping[str, Any], kinds: Mapping[str, str]) -> None:
    """What is absent or null is left to its reader."""
    for key, kind in kinds.items():
        if given.get(key) is not None:
            _check_kind(f"{where}{key}", given[key], kind)


def _check_kind(key: str, value: Any, kind: str) -> None:
    if not _FITS[kind](value):
        raise SettingsError(f"{key}: must be {kind}, not {value!r}")
