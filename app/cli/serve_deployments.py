"""`deployments` of a config: overrides of what Legato's application deploys, by their names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from actors.engine.config import EngineConfig
from actors.scheduling.build import check_config
from app.settings.model_folder import SettingsError
from app.settings.models import engine_groups, is_fleet, parse_each


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


def check_sleep(config: dict[str, Any]) -> None:
    """`fleet.sleeps` and `min_replicas: 0` require each other: fronts wake engines that have
    ended."""
    for application in config["applications"]:
        args = application.get("args") or {}
        if not is_fleet(args):
            continue
        least = {
            d.get("name"): (d.get("autoscaling_config") or {}).get("min_replicas", 1)
            for d in application.get("deployments") or []
        }
        each = parse_each(args)
        for group in engine_groups(args):
            name, fleet = group.deployment, each[group.model].fleet
            sleeps = fleet is not None and fleet.sleeps
            if sleeps and least.get(name, 1) != 0:
                raise SettingsError(
                    f"fleet.sleeps: needs autoscaling_config.min_replicas: 0 of deployment {name}"
                )
            if not sleeps and least.get(name, 1) == 0:
                raise SettingsError(
                    f"deployment {name}: min_replicas: 0 needs fleet.sleeps: true, or no request "
                    "wakes an engine"
                )


def check_alone(config: dict[str, Any]) -> None:
    """`listen` requires one application, with one replica or the fronts of a fleet."""
    deployments = [d for a in config["applications"] for d in a.get("deployments") or []]
    several = any(
        d.get("num_replicas") not in (None, 1) or d.get("autoscaling_config") for d in deployments
    )
    fleets = all(is_fleet(a.get("args") or {}) for a in config["applications"])
    if len(config["applications"]) > 1 or (several and not fleets):
        raise SettingsError(
            "listen: only for one replica; for several engines behind it, set args.fleet"
        )
    if config.get("proxy_location") != "Disabled":
        raise SettingsError("listen: needs proxy_location: Disabled, or a proxy takes the port")
    if (prefix := config["applications"][0].get("route_prefix", "/")) != "/":
        shown = "null" if prefix is None else prefix
        raise SettingsError(f"route_prefix: {shown} has no effect with listen; leave it out")
