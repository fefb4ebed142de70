"""The composition root: `import_path: app.main:build_app`."""

from __future__ import annotations

import os
from typing import Any, cast

import ray
from ray import serve
from ray._private.accelerators import get_accelerator_manager_for_resource

from actors.engine.config import EngineConfig
from actors.executor.placement import REPLICA_CPUS, bundles
from app.fleet_server import EngineReplica, Front
from app.ray_environment import ENVIRONMENT
from app.server import LLMServer
from app.settings.device import takes_gpus
from app.settings.load import parse, resolve
from app.settings.model_folder import pin_models
from app.settings.models import engine_groups, expand, is_fleet, resolve_each

# For a cluster that `serve.run` is still to start: its raylet reads this when it begins.
os.environ.setdefault("RAY_worker_niceness", ENVIRONMENT["RAY_worker_niceness"])


def build_app(args: dict[str, Any]) -> serve.Application:
    """A Serve application from the YAML's `args`; raises SettingsError before anything starts."""
    resolve_each(args)  # its errors name the model
    each = [pin_models(_with_device(own)) for own in expand(args)]
    configs = [resolve(parse(own)) for own in each]
    if not is_fleet(args):
        deployment = cast(serve.Deployment, LLMServer).options(**_place(configs[0]))
        return deployment.bind(each[0])
    groups = engine_groups(args)
    engines = [
        cast(serve.Deployment, EngineReplica)
        .options(name=group.deployment, **_place(configs[group.model]))
        .bind(each[group.model], group.fleet, group.role.value)
        for group in groups
    ]
    fleets = list(dict.fromkeys(group.fleet for group in groups))
    front = cast(serve.Deployment, Front).options(ray_actor_options={"num_cpus": REPLICA_CPUS})
    return front.bind(each, fleets, *engines)


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
