"""A config outside `args`, which Ray Serve reads: it ignores keys that it does not know."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from pydantic import BaseModel, ValidationError

from app.settings.model_folder import SettingsError

OURS = "app.main:build_app"


def prefix_of(application: Mapping[str, Any]) -> str | None:
    """What the paths of its routes begin with, "" at the root; None where only handles reach it."""
    prefix = application.get("route_prefix", "/")
    return None if prefix is None else str(prefix).rstrip("/")


def first_of_ours(applications: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The first of Legato's applications that HTTP reaches; the first of all where there is none,
    as it may wrap Legato's."""
    reached = (a for a in applications if a["import_path"] == OURS and prefix_of(a) is not None)
    return next(reached, applications[0])


def health_paths(config: Mapping[str, Any]) -> list[str]:
    """Where Legato's applications, and whichever is at the root, say whether they are ready."""
    prefixes = [
        prefix
        for application in config["applications"]
        if (prefix := prefix_of(application)) == "" or application["import_path"] == OURS
    ]
    return [f"{prefix}/health" for prefix in prefixes if prefix is not None]


def check_serve_keys(config: Mapping[str, Any]) -> None:
    """Raises SettingsError naming a key that Serve would ignore or whose value it refuses, or an
    `import_path` without its module. Imports Serve, which takes a second."""
    for where, given, known in _levels(config):
        for key in given:
            if key not in known:
                close = difflib.get_close_matches(str(key), known, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise SettingsError(f"{where}{key}: unknown key{hint}")
    _check_values(config)
    for application in config["applications"]:
        if not application.get("runtime_env"):  # which may bring the module
            _check_import(str(application["import_path"]))


def _levels(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], Iterable[str]]]:
    """Each mapping of the config: what its keys are called before, itself, and the known keys."""
    from ray.serve.config import AutoscalingConfig
    from ray.serve.schema import (
        DeploymentSchema,
        HTTPOptionsSchema,
        ServeApplicationSchema,
        ServeDeploySchema,
    )

    yield "", config, ServeDeploySchema.model_fields
    yield "http_options.", config.get("http_options") or {}, HTTPOptionsSchema.model_fields
    for number, application in enumerate(config["applications"]):
        where = f"applications.{number}."
        yield where, application, ServeApplicationSchema.model_fields
        for deployment in application.get("deployments") or []:
            of_it = f"{where}deployments.{deployment.get('name')}."
            yield of_it, deployment, DeploymentSchema.model_fields
            scaled = deployment.get("autoscaling_config") or {}
            yield f"{of_it}autoscaling_config.", scaled, AutoscalingConfig.model_fields


def _check_values(config: Mapping[str, Any]) -> None:
    from ray.serve.config import AutoscalingConfig
    from ray.serve.schema import ServeDeploySchema

    _check_model(ServeDeploySchema, config)
    for number, application in enumerate(config["applications"]):
        for place, deployment in enumerate(application.get("deployments") or []):
            if scaled := deployment.get("autoscaling_config"):
                # Serve looks into it only when it deploys, and adds its own bounds to `auto`.
                default = AutoscalingConfig.default().model_dump()
                base = default if deployment.get("num_replicas") == "auto" else {}
                where = ("applications", number, "deployments", place, "autoscaling_config")
                _check_model(AutoscalingConfig, {**base, **scaled}, where)


def _check_model(
    model: type[BaseModel], given: Mapping[str, Any], where: tuple[str | int, ...] = ()
) -> None:
    try:
        model.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        # Without pydantic's own names of kinds, as in `num_replicas.constrained-int`.
        found = [part for part in map(str, first["loc"]) if part.isidentifier() or part.isdigit()]
        key = ".".join([*map(str, where), *found])
        raise SettingsError(f"{key}: {first['msg']}" if key else first["msg"]) from error
    except (TypeError, AttributeError, KeyError) as error:  # of the schema's own validators
        raise SettingsError(f"not a Serve config: {error!r}") from error


def _check_import(path: str) -> None:
    module = path.partition(":")[0] if ":" in path else path.rpartition(".")[0]
    try:
        found = find_spec(module) is not None
    except (ImportError, ValueError):  # of a package above it; no name of a module
        found = False
    if not found or (module == "app.main" and path != OURS):
        raise SettingsError(f"import_path: no {path!r} here; Legato's is {OURS}")
