"""The composition root: `import_path: app.main:build_app`."""

from __future__ import annotations

from typing import Any, cast

import ray
from ray import serve

from actors.placement import REPLICA_CPUS, bundles
from app.fleet_server import Engine, Front
from app.server import LLMServer
from app.settings import parse, resolve


def build_app(args: dict[str, Any]) -> serve.Application:
    """A Serve application from the YAML's `args`; raises SettingsError before anything starts."""
    args = _with_device(args)
    settings = parse(args)
    config = resolve(settings)
    groups = bundles(
        config.stage.num_stages,
        config.stage.tensor_ranks,
        config.cpus_per_rank,
        config.gpus_per_rank,
    )
    place = {
        "placement_group_bundles": groups,
        "placement_group_strategy": "PACK",
        "ray_actor_options": {"num_cpus": groups[0]["CPU"]},
    }
    if settings.fleet is None:
        return cast(serve.Deployment, LLMServer).options(**place).bind(args)
    engines = cast(serve.Deployment, Engine).options(**place).bind(args)
    front = cast(serve.Deployment, Front).options(ray_actor_options={"num_cpus": REPLICA_CPUS})
    return front.bind(args, engines)


def _with_device(args: dict[str, Any]) -> dict[str, Any]:
    """`parallel.device: auto` decided once for all replicas: cuda where the cluster has GPUs and
    torch can use them."""
    if parse(args).parallel.device != "auto":
        return args
    has_gpus = ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0
    if has_gpus:
        import torch  # here, as it takes seconds

        has_gpus = torch.version.cuda is not None
    parallel = {**(args.get("parallel") or {}), "device": "cuda" if has_gpus else "cpu"}
    return {**args, "parallel": parallel}
