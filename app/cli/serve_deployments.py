"""`deployments` of a config: overrides of what Legato's application deploys, by their names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from actors.engine.config import EngineConfig
from actors.scheduling.build import check_config
from app.settings.model_folder import SettingsError
from app.settings.models import engine_groups, is_fleet


def check_deployments(
    overrides: Sequence[Mapping[str, Any]], args: Mapping[str, Any], models: Sequence[EngineConfig]
) -> None:
    """Raises SettingsError naming a deployment that there is not, or a live setting in a
    `user_config` that its replicas would refuse. models: the settings of each, resolved."""
    engines = {"LLMServer": models[0]}
    if is_fleet(args):
        engines = {group.deployment: models[group.model] for group in engine_groups(args)}
    names = [*engines, "Front"] if is_fleet(args) else [*engines]
    for override in overrides:
        name, changes = str(override.get("name")), override.get("user_config")
        where = f"deployments.{name}"
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"those here are {', '.join(names)}"
            raise SettingsError(f"{where}: no such deployment; {hint}")
        if not changes:
            continue
        if name not in engines:
            raise SettingsError(f"{where}.user_config: belongs to {' and '.join(engines)}")
        if not isinstance(changes, Mapping):
            raise SettingsError(f"{where}.user_config: must be a mapping of live settings")
        engine = engines[name]
        try:
            check_config(engine.scheduler.with_changes(changes), is_measured=engine.calibrate)
        except ValueError as error:  # ConfigError is one
            raise SettingsError(f"{where}.user_config.{error}") from error
