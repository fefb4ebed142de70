"""The composition root: `import_path: app.main:build_app`."""

from __future__ import annotations

from typing import Any, cast

from ray import serve

from actors.placement import bundles
from app.server import LLMServer
from app.settings import parse, resolve


def build_app(args: dict[str, Any]) -> serve.Application:
    """A Serve application from the YAML's `args`; raises SettingsError before anything starts."""
    config = resolve(parse(args))
    groups = bundles(
        config.stage.num_stages,
        config.stage.tensor_ranks,
        config.cpus_per_rank,
        config.gpus_per_rank,
    )
    deployment = cast(serve.Deployment, LLMServer).options(
        placement_group_bundles=groups,
        placement_group_strategy="PACK",
        ray_actor_options={"num_cpus": groups[0]["CPU"]},
    )
    return deployment.bind(args)
