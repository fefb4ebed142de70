"""The composition root: `import_path: app.main:build_app`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, cast

import ray
from ray import serve
from ray._private.accelerators import get_accelerator_manager_for_resource

from actors.engine.config import EngineConfig
from actors.executor.placement import REPLICA_CPUS, bundles
from app.fleet_server import FRONT_WITHOUT_ROUTES, EngineReplica, Front
from app.ray_environment import ENVIRONMENT
from app.server import WITHOUT_ROUTES, LLMServer
from app.settings.device import takes_gpus
from app.settings.load import parse, resolve
from app.settings.model_folder import SettingsError, pin_models
from app.settings.models import engine_groups, expand, is_fleet, resolve_each

# For a cluster that `serve.run` is still to start: its raylet reads this when it begins.
os.environ.setdefault("RAY_worker_niceness", ENVIRONMENT["RAY_worker_niceness"])


def build_app(args: dict[str, Any]) -> serve.Application:
    """A Serve application from the YAML's `args`; raises SettingsError before anything starts."""
    return build(args)


def build(
    args: dict[str, Any],
    *,
    http: bool = True,
    deployments: Mapping[str, Mapping[str, Any]] | None = None,
) -> serve.Application:
    """`build_app` with what the YAML says outside `args`, for Python: Serve takes no builder of
    more than one parameter.

    http: whether Serve routes requests to it; False for a part of another application, which calls
    it by the handle that it is bound to. deployments: their options (`num_replicas`,
    `autoscaling_config`, ...) by name: `LLMServer`, or `Front` and `Engine` of a fleet.
    """
    resolve_each(args)  # its errors name the model
    each = [pin_models(_with_device(own)) for own in expand(args)]
    configs = [resolve(parse(own)) for own in each]
    groups = engine_groups(args) if is_fleet(args) else []
    names = {"Front", *(group.deployment for group in groups)} if groups else {"LLMServer"}
    chosen = deployments or {}
    for name in chosen.keys() - names:
        raise SettingsError(f"deployments.{name}: none of {', '.join(sorted(names))}")
    if not groups:
        server = LLMServer if http else WITHOUT_ROUTES
        return (
            server.options(**_place(configs[0]))
            .options(**chosen.get("LLMServer", {}))
            .bind(each[0])
        )
    engines = [
        cast(serve.Deployment, EngineReplica)
        .options(name=group.deployment, **_place(configs[group.model]))
        .options(**chosen.get(group.deployment, {}))
        .bind(each[group.model], group.fleet, group.role.value)
        for group in groups
    ]
    fleets = list(dict.fromkeys(group.fleet for group in groups))
    front = (Front if http else FRONT_WITHOUT_ROUTES).options(
        ray_actor_options={"num_cpus": REPLICA_CPUS}
    )
    return front.options(**chosen.get("Front", {})).bind(each, fleets, *engines)


def _place(config: EngineConfig) -> dict[str, Any]:
    """The resources that Serve reserves for an engine and its stages."""
    groups = bundles(
        config.stage.num_stages,
        config.stage.tensor_ranks,
        config.cpus_per_rank,
        config.gpus_per_rank,
    )
    return {
        "placement_group_bundles": groups,
        "placement_group_strategy": "PACK",
        "ray_actor_options": {"num_cpus": groups[0]["CPU"]},
    }


def _with_device(args: dict[str, Any]) -> dict[str, Any]:
    """`parallel.device: auto` decided once for all replicas: cuda where the cluster has GPUs and
    torch can use them."""
    if parse(args).parallel.device != "auto":
        return args
    device = "cuda" if takes_gpus("auto", _num_gpus()) else "cpu"
    parallel = {**(args.get("parallel") or {}), "device": device}
    return {**args, "parallel": parallel}


def _num_gpus() -> float:
    """GPUs of the cluster; of this machine where `serve.run(build_app(args))` is still to start or
    join one, counted as Ray will count them."""
    if ray.is_initialized():
        return float(ray.cluster_resources().get("GPU", 0.0))
    gpus = get_accelerator_manager_for_resource("GPU")
    visible = gpus.get_current_process_visible_accelerator_ids()
    found = gpus.get_current_node_num_accelerators()
    return float(found if visible is None else min(found, len(visible)))
