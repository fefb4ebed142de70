"""Options of `legato simulate` for roles of engines and for streams that move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import typer

from actors.fleet.roles import WAYS
from app.simulate.hardware.deployments import load_model
from app.simulate.hardware.interconnect import (
    INTERCONNECTS,
    kv_bytes_per_token,
    parse_interconnect,
    shape_of,
)
from app.simulate.options import EngineOptions
from app.simulate.run.deployment import Deployment, Division, SharedKV
from app.simulate.run.simulation import scheduler_config


@dataclass(frozen=True)
class WayOptions:
    """How prompts and streams are divided over the engines, and which of them move."""

    way: Annotated[
        str, typer.Option(help=f"{', '.join(WAYS)}: which engines compute prompts, which decode.")
    ] = "colocated"
    prefill_engines: Annotated[
        int | None, typer.Option(help="Engines that only compute prompts.", min=1)
    ] = None
    decode_engines: Annotated[
        int | None, typer.Option(help="Engines that decode; flexible: prompts too.", min=1)
    ] = None
    interconnect: Annotated[
        str,
        typer.Option(
            help=f"What joins the engines: {' or '.join(INTERCONNECTS)}, or its GB/s and "
            "microseconds as 25,5; nvlink if absent. Colocated: KV moves over it with --rebalance "
            "or --drain; if absent, KV is computed again."
        ),
    ] = ""
    shape: Annotated[
        str, typer.Option(help="Of configs/models/shapes, for the size of KV; else by the name.")
    ] = ""

    rebalance: Annotated[
        bool, typer.Option("--rebalance", help="What is late at an engine goes on at another.")
    ] = False
    drain: Annotated[
        float | None, typer.Option(help="Seconds after which the first engine leaves.", min=0.0)
    ] = None

    @property
    def num_engines(self) -> int:
        return (self.prefill_engines or 0) + (self.decode_engines or 0)

    def deployment(self, engines: EngineOptions) -> Deployment:
        """Raises ValueError for options without effect or that contradict each other."""
        self.check(engines)
        truth = load_model(engines.model)
        shared_kv = self.shared_kv(truth.name)
        config = scheduler_config(
            truth,
            policy=engines.policy,
            budget=engines.budget,
            token_budget=engines.token_budget,
            tbt_s=engines.tbt_s(truth),
            max_requests=engines.max_requests,
            admission=engines.admission,
            order=engines.order,
            drafter="none" if engines.acceptance is None else "auto",
            prefix_cache=shared_kv is not None,
            overlap_chunks=True,  # as the engine does
        )
        return Deployment(
            config,
            truth,
            num_replicas=engines.replicas or self.num_engines or 1,
            routing=engines.routing or "slack",
            acceptance=engines.acceptance,
            division=self.division(truth.name),
            rebalance=self.rebalance,
            drains=() if self.drain is None else ((self.drain, 0),),
            shared_kv=shared_kv,
        )

    def check(self, engines: EngineOptions) -> None:
        """Raises ValueError naming an option that is unknown, missing or without effect."""
        if self.way not in WAYS:
            raise ValueError(f"unknown way {self.way!r}; known: {', '.join(WAYS)}")
        numbers = {
            "--prefill-engines": self.prefill_engines,
            "--decode-engines": self.decode_engines,
        }
        if self.way == "colocated":
            self._check_colocated(engines, numbers)
            return
        if self.drain is not None:
            raise ValueError(f"--drain has no effect with --way {self.way}")
        for option, value in numbers.items():
            if value is None:
                raise ValueError(f"--way {self.way} needs {option}")
        if engines.replicas is not None:
            raise ValueError(
                f"--replicas has no effect with --way {self.way}, which has two numbers"
            )
        if engines.admission != "all":
            message = "a stream that has begun is not refused where it goes on"
            raise ValueError(f"--admission {engines.admission} and --way {self.way}: {message}")

    def _check_colocated(self, engines: EngineOptions, numbers: Mapping[str, int | None]) -> None:
        for option, value in numbers.items():
            if value:
                raise ValueError(f"{option} has no effect with --way colocated")
        moving = {"--rebalance": self.rebalance, "--drain": self.drain is not None}
        for option, is_given in moving.items():
            if is_given and (engines.replicas or 1) < 2:
                raise ValueError(f"{option} needs --replicas, two at least")
        for option, text in (("--interconnect", self.interconnect), ("--shape", self.shape)):
            if text and not any(moving.values()):
                wanted = " or ".join(moving)
                raise ValueError(f"{option} has no effect with --way colocated but with {wanted}")

    def shared_kv(self, model: str) -> SharedKV | None:
        """How colocated engines with an interconnect share KV; None: it does not move."""
        if self.way != "colocated" or not self.interconnect:
            return None
        shape = self.shape or shape_of(model)
        if not shape:
            raise ValueError(f"--interconnect needs --shape: {model!r} names no shape")
        return SharedKV(parse_interconnect(self.interconnect), kv_bytes_per_token(shape))

    def division(self, model: str) -> Division | None:
        """None: colocated."""
        if self.way == "colocated":
            return None
        return self.divided(self.way, self.prefill_engines or 0, model)

    def divided(self, way: str, num_prefill: int, model: str) -> Division:
        """Raises ValueError where the size of KV is unknown."""
        shape = self.shape or shape_of(model)
        if not shape:
            raise ValueError(f"{way} engines need --shape: {model!r} names no shape")
        interconnect = parse_interconnect(self.interconnect or "nvlink")
        return Division(way, num_prefill, interconnect, kv_bytes_per_token(shape))
