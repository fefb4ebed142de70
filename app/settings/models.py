"""`models` in a deployment's `args`: several models behind one address.

    models:
      - model: {path: configs/models/small}
      - model: {path: configs/models/large, name: large}
        parallel: {pipeline_stages: 2}
        slo: {tbt_ms: 200}
        adapters: {max_adapters: 2, paths: {pirate: adapters/pirate}}
    scheduling: {max_requests: 64}   # of every model without its own

An entry is like `args`; missing keys are taken from the level of `models`, where they have an
effect. Each model has its own engines, the deployment `engine_deployment(name)`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from actors.engine.config import EngineConfig
from actors.fleet.snapshot import Role
from actors.stage.weights.gguf_names import model_stem
from app.paths import locate
from app.settings.effects import without_effect
from app.settings.load import parse, resolve
from app.settings.model_folder import SettingsError, hub_model
from app.settings.schema import Settings

# Allowed keys of an entry; the others apply to the address.
OWN: Final = (
    "model", "parallel", "scheduling", "slo", "kv", "speculation", "engine", "fleet", "adapters",
)  # fmt: skip


def served_name(settings: Settings) -> str:
    """The model's name for clients."""
    if settings.model.name:
        return settings.model.name
    hub = hub_model(settings.model.path)
    if hub is not None:
        return hub.repo if hub.file is None else model_stem(hub.file)
    path = locate(settings.model.path)
    return model_stem(path.name) if path.suffix == ".gguf" else path.resolve().name


def engine_deployment(name: str | None = None) -> str:
    """Serve's name of the engine deployment of a model; None: of the only model."""
    return "Engine" if name is None else f"Engine-{_plain(name)}"


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)


def is_fleet(args: Mapping[str, Any]) -> bool:
    """Whether fronts and engines are separate deployments."""
    return "models" in args or args.get("fleet") is not None


def expand(args: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The complete `args` of every model; without `models` there is one, with `args` unchanged.

    Raises SettingsError naming an invalid entry.
    """
    if not isinstance(args, Mapping):  # of a script, or a file that no one has checked
        raise SettingsError("args: must be a mapping, such as {model: {path: org/name}}")
    if "models" not in args:
        return [dict(args)]
    shared = {key: value for key, value in args.items() if key != "models"}
    if shared.get("adapters") is not None:
        raise SettingsError("adapters: with `models`, put them into the entries of their models")
    entries = args["models"]
    if not isinstance(entries, Sequence) or isinstance(entries, str) or not entries:
        raise SettingsError("models: must be a list of at least one model")
    expanded = []
    for number, entry in enumerate(entries):
        if not isinstance(entry, Mapping):
            raise SettingsError(f"models.{number}: must be a mapping with a section `model`")
        for key in entry:
            if key not in OWN:
                raise SettingsError(
                    f"models.{number}.{key}: not a setting of one model; those are {', '.join(OWN)}"
                )
        whole: dict[str, Any] = {"fleet": {}, **shared}
        for key, own in entry.items():
            beside = whole.get(key)
            both = isinstance(own, Mapping) and isinstance(beside, Mapping)
            whole[key] = {**beside, **own} if both else own  # type: ignore[dict-item]
        whole["fleet"] = {} if whole["fleet"] is None else whole["fleet"]
        expanded.append(whole)
    _leave_out_idle(expanded, shared, entries)
    return expanded


def _leave_out_idle(
    expanded: Sequence[dict[str, Any]], shared: Mapping[str, Any], entries: Sequence[Any]
) -> None:
    """Leave out what a model has from the level of `models` alone and what is without effect on it,
    as long as it has one on another model."""
    idle = []
    for whole, entry in zip(expanded, entries, strict=True):
        try:
            found = dict(without_effect(parse(whole)))
        except SettingsError:  # told where it is parsed
            return
        idle.append({key: found[key] for key in found.keys() & _keys_from(shared, entry)})
    for key, why in idle[0].items():
        if all(key in one for one in idle):
            raise SettingsError(f"{key}: {why}, in every one of `models`")
    for whole, keys in zip(expanded, idle, strict=True):
        for section, _, name in (key.partition(".") for key in keys):
            whole[section] = {key: own for key, own in whole[section].items() if key != name}


def _keys_from(shared: Mapping[str, Any], entry: Mapping[str, Any]) -> set[str]:
    keys = set()
    for section, beside in shared.items():
        own = entry.get(section, {})
        if section in OWN and isinstance(beside, Mapping) and isinstance(own, Mapping):
            keys |= {f"{section}.{name}" for name in beside if name not in own}
    return keys


def parse_each(args: Mapping[str, Any]) -> list[Settings]:
    """`app.settings.load.parse` for every model."""
    found = []
    for number, whole in enumerate(expand(args)):
        try:
            found.append(parse(whole))
        except SettingsError as error:
            of = "" if _is_beside(args, number, error) else entry_of(args, number)
            raise SettingsError(f"{of}{error}") from error
    _check_names([served_name(settings) for settings in found])
    _check_adapter_names(args, found)
    return found


def _is_beside(args: Mapping[str, Any], number: int, error: SettingsError) -> bool:
    """Whether all that is wrong with the settings of an entry is beside `models`."""
    if "models" not in args or not isinstance(error.__cause__, ValidationError):
        return False
    places = [problem["loc"][:2] for problem in error.__cause__.errors()]
    entry = args["models"][number]
    return all(_has(args, place) and not _has(entry, place) for place in places)


def _has(within: Any, place: Sequence[int | str]) -> bool:
    for key in place:
        if not isinstance(within, Mapping):
            return True  # nothing deeper is read
        if key not in within:
            return False
        within = within[key]
    return True


def resolve_each(args: Mapping[str, Any]) -> list[EngineConfig]:
    """`app.settings.load.resolve` for every model."""
    found = []
    for number, settings in enumerate(parse_each(args)):
        try:
            found.append(resolve(settings))
        except SettingsError as error:
            raise SettingsError(f"{entry_of(args, number)}{error}") from error
    return found


def entry_of(args: Mapping[str, Any], number: int) -> str:
    """What the error of a model's settings begins with: its entry, if there are several."""
    return f"models.{number}: " if "models" in args else ""


def _check_names(names: Sequence[str]) -> None:
    """Check that names are unique, for clients and for Serve's deployments."""
    for of, counts in (("named", Counter(names)), ("written", Counter(map(_plain, names)))):
        name, count = counts.most_common(1)[0]
        if count > 1:
            raise SettingsError(
                f"models: {count} are {of} {name!r}; give each a `model.name` of its own"
            )


def _check_adapter_names(args: Mapping[str, Any], each: Sequence[Settings]) -> None:
    """Check that no adapter is named as a model, or as an adapter of another one."""
    taken = {served_name(settings): "a model" for settings in each}
    for number, settings in enumerate(each):
        of = f"an adapter of {served_name(settings)!r}"
        for name in settings.adapter_names:
            if name in taken:
                key = f"{entry_of(args, number)}adapters.paths.{name}"
                raise SettingsError(f"{key}: the name is that of {taken[name]}; choose another")
            taken[name] = of


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """The engines of one role of one model. fleet: Serve's name for those of all roles, under
    which fronts find them; deployment: for these; model: its number among `models`."""

    fleet: str
    deployment: str
    role: Role
    model: int


def engine_groups(args: Mapping[str, Any]) -> list[EngineGroup]:
    """The groups of every model, in the order of `models`. Raises SettingsError for
    names that collide."""
    groups = []
    for number, settings in enumerate(parse_each(args)):
        fleet = engine_deployment(served_name(settings) if "models" in args else None)
        roles = (Role.BOTH,) if settings.fleet is None else settings.fleet.roles
        for role in roles:
            name = fleet if len(roles) == 1 else f"{fleet}-{role.value}"
            groups.append(EngineGroup(fleet, name, role, number))
    name, count = Counter(group.deployment for group in groups).most_common(1)[0]
    if count > 1:
        raise SettingsError(f"models: {count} deployments would be named {name}")
    return groups
