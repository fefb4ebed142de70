"""The section `fleet` of a deployment's `args`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from actors.fleet.roles import WAYS, build_way
from actors.fleet.routers import build_router
from actors.fleet.snapshot import Role


class FleetSettings(BaseModel):
    """Several engines behind fronts: the deployments `Front` and `Engine`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    routing: str = Field(
        "slack",
        description="Which engine takes a request: slack (least work over slack left), "
        "round_robin, least_loaded, power_of_two, prefix.",
    )
    routing_options: Mapping[str, Any] = Field(
        default_factory=dict, description="Options of that router."
    )
    way: Literal["colocated", "split", "flexible"] = Field(
        "colocated",
        description="Which engines compute prompts. colocated: all. split (disaggregated prefill): "
        "the deployment `Engine-prefill` computes prompts and first tokens, `Engine-decode` "
        "continues. flexible: "
        "`Engine-both` continues, and computes prompts too while its streams leave time.",
    )
    way_options: Mapping[str, Any] = Field(
        default_factory=dict, description="Options of flexible: `least_gain`, `least_slack`."
    )
    start_within_s: float = Field(
        20.0, gt=0, description="A request that finds no engine for so long gets 503."
    )
    resume_within_s: float = Field(
        120.0, gt=0, description="A stream that has lost its engine and finds no other ends then."
    )
    rebalance: bool = Field(
        True, description="What is late at one engine goes to another that keeps its objective."
    )
    sleeps: bool = Field(
        False,
        description="All engines may end while no request comes (`min_replicas: 0` of `Engine`). A "
        "front without any is then ready, and a request wakes one: start_within_s must be longer "
        "than an engine takes to start.",
    )
    allow_inexact: bool = Field(
        False, description="A stream may also go on at an engine that rounds otherwise (another "
        "processor, backend or dtype), where there is no other. Among engines that round alike it "
        "moves either way, exactly on the batch-invariant `cpu` backend only."
    )  # fmt: skip
    tcp: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Engines listen for other nodes: for fronts, and for what they share of KV; "
        "auto: where the cluster has several nodes as the engine starts.",
    )

    @model_validator(mode="after")
    def _router_exists(self) -> FleetSettings:
        build_way(self.way, build_router(self.routing, self.routing_options), self.way_options)
        return self

    @property
    def listens_for_nodes(self) -> bool | None:
        """None: auto."""
        return {"always": True, "never": False}.get(self.tcp)

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles of its deployments of engines."""
        if self.way == "colocated":
            return (Role.BOTH,)
        return WAYS[self.way].roles(1, 1)
