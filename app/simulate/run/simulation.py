"""Run a workload through one simulated deployment: arrivals, replicas, routing, autoscaling.

run = simulate(workload, Deployment(scheduler_config(model, tbt_s=0.1), model))
run.summary().tbt_p99
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from actors.fleet.scaling import EngineLoad
from actors.scheduling.config import SchedulerConfig
from actors.scheduling.cost.model import CostModel
from actors.scheduling.request import Objective, Request, SamplingParams
from app.simulate.run.autoscale import Scaler
from app.simulate.run.deployment import (
    Autoscale,
    Deployment,
    divided_memory,
    with_prefix_cache,
)
from app.simulate.run.divided import DividedFleet
from app.simulate.run.fleet import SimulatedFleet
from app.simulate.run.handover_parts import HandoverTotals
from app.simulate.run.moved import MoveTotals
from app.simulate.run.record import RunRecord, Summary, summarize
from app.simulate.run.replica import INFINITY, Replica, TokenOf
from app.simulate.run.sharing import SharingFleet
from app.simulate.workload.requests import Workload

__all__ = [
    "Autoscale",
    "Deployment",
    "SimulatedRun",
    "requests_of",
    "scheduler_config",
    "simulate",
]

# Sessions use disjoint token ranges, so the prefix cache hits only on real repeats.
SESSION_TOKENS = 1 << 20


@dataclass(slots=True)
class SimulatedRun:
    """A finished run: the deployment, its record and its replica time."""

    deployment: Deployment
    workload: Workload
    record: RunRecord
    replicas: list[Replica]
    replica_seconds: float  # sum of the time replicas were up
    scaling: list[tuple[float, int]] = field(default_factory=list)  # (time, replicas wanted)
    moves: list[tuple[float, int]] = field(default_factory=list)  # (time, request that moved)
    loads: list[Mapping[str, EngineLoad]] = field(default_factory=list)  # at each scaling decision
    handovers: HandoverTotals | None = None  # of engines divided by roles
    moved: MoveTotals | None = None  # of streams that changed their engine

    def summary(self, *, skip: int = 0, ttft_objective_s: float | None = None) -> Summary:
        """Figures against the deployment's own TBT objective."""
        config = self.deployment.config
        return summarize(
            self.record,
            tbt_objective_s=config.tbt_s,
            ttft_objective_s=ttft_objective_s if ttft_objective_s else config.ttft_s,
            skip=skip,
        )


def scheduler_config(
    model: CostModel,
    *,
    policy: str = "sarathi",
    budget: str = "fixed",
    token_budget: int | None = None,
    tbt_s: float | None = None,
    max_requests: int = 128,
    block_size: int = 16,
    **changes: object,
) -> SchedulerConfig:
    """The core's settings for a modeled deployment: memory, stages and cost model from `model`.
    States, where layers keep them, take memory as of a live engine (`EngineConfig.cache_sizes`).

    Plans are made when a step ends (no lookahead), and a prompt is in one step at a time, as in the
    systems that the paper compares.
    """
    if model.kv_tokens < block_size:
        raise ValueError(f"{model.name}: kv_tokens is {model.kv_tokens}, nothing could run")
    max_requests, kv_tokens = divided_memory(model, max_requests)
    if kv_tokens < block_size:
        raise ValueError(f"{model.name}: no KV fits beside the states of one request")
    base = SchedulerConfig(
        num_blocks=kv_tokens // block_size,
        block_size=block_size,
        prefix_cache=False,
        swap="never",
        max_requests=max_requests,
        max_model_len=model.max_model_len or 16384,
        max_step_tokens=16384,
        num_stages=model.num_stages,
        lookahead=False,
        overlap_chunks=False,
        policy=policy,
        budget=budget,
        token_budget=token_budget,
        tbt_s=tbt_s,
        cost_model=model.to_dict(),
        drafter="none",  # another one drafts where a `Deployment` has an acceptance
    )
    config: SchedulerConfig = replace(base, **changes)  # type: ignore[arg-type]
    # No more than all requests at full length can be used, so an engine has no more
    most_blocks = config.max_requests * -(-config.max_model_len // block_size) + 1
    config = replace(config, num_blocks=min(config.num_blocks, most_blocks))
    if not model.state_tokens:
        return config
    return with_prefix_cache(replace(config, num_saved_states=0), config.prefix_cache)


@functools.lru_cache(maxsize=20_000)
def _blank_prompt(num_tokens: int) -> tuple[int, ...]:
    return (0,) * num_tokens


def requests_of(workload: Workload, objective: Objective | None = None) -> Callable[[int], Request]:
    """Builds request `i` on demand, so a long workload need not be in memory."""
    arrivals = workload.arrival_s.tolist()
    prompts, outputs = workload.prompt_tokens.tolist(), workload.output_tokens.tolist()
    sessions = workload.sessions.tolist()
    shared = workload.shared_tokens.tolist() if workload.branching else prompts
    plain = objective or Objective()

    def build(index: int) -> Request:
        session, length = sessions[index], prompts[index]
        if session < 0:
            # Alike but for the first token: a request is known by its prompt when it returns.
            prompt = (index, *_blank_prompt(length - 1))
        else:
            base, own = session * SESSION_TOKENS, _own_tokens(index)
            common = min(shared[index], length)
            prompt = (*range(base, base + common), *range(own, own + length - common))
        sampling = SamplingParams(max_tokens=outputs[index], min_tokens=outputs[index])
        return Request(index, prompt, sampling, arrivals[index], objective=plain)

    return build


def simulate(
    workload: Workload,
    deployment: Deployment,
    *,
    seed: int = 0,
    keep_steps: bool = False,
    until_s: float = INFINITY,
    objective: Objective | None = None,
    should_stop: Callable[[RunRecord, int], bool] | None = None,
    requests: Sequence[Request] | None = None,
    token_of: TokenOf | None = None,
) -> SimulatedRun:
    """Run to the last token, to `until_s`, or until `should_stop(record, arrived)` is true.

    should_stop: called once per 64 arrivals, to end a capacity probe that cannot pass.
    requests, token_of: recorded requests and their sampled tokens, in place of blank requests of
        the workload's lengths; ids count from 0.
    """
    record = RunRecord(len(workload), keep_steps)
    record.arrival_s = workload.arrival_s.tolist()
    has_sessions = int(workload.sessions.max(initial=-1)) >= 0
    tokens = token_of or (_session_tokens(workload) if has_sessions else None)
    fleet = _kind_of(deployment)(deployment, record, seed, tokens)
    scaler = None if deployment.autoscale is None else Scaler(fleet, deployment.autoscale)
    build = requests_of(workload, objective) if requests is None else requests.__getitem__
    arrivals = [*record.arrival_s, INFINITY]
    next_arrival_s = fleet.next_arrival_s = arrivals[0]
    index = 0
    while True:
        replica = fleet.earliest()
        step_s = replica.next_s if replica is not None else INFINITY
        if next_arrival_s == INFINITY and step_s == INFINITY and not fleet.has_pending:
            break
        if fleet.timers.next_s < min(step_s, next_arrival_s):
            if fleet.timers.next_s > until_s:
                break
            fleet.timers.run_next()
            continue
        if step_s <= next_arrival_s:
            if step_s == INFINITY or step_s > until_s or replica is None:
                break
            fleet.touched(replica, replica.advance())
            continue
        if next_arrival_s > until_s:
            break
        fleet.submit(build(index), next_arrival_s)
        index += 1
        next_arrival_s = fleet.next_arrival_s = arrivals[index]
        if should_stop is not None and not index & 63 and should_stop(record, index):
            break
    fleet.close(max(record.end_s, arrivals[index - 1] if index else 0.0))
    return SimulatedRun(
        deployment,
        workload,
        record,
        fleet.all,
        fleet.replica_seconds,
        scaler.decisions if scaler else [],
        fleet.moved.moves,
        scaler.loads if scaler else [],
        fleet.handover_totals(),
        fleet.move_totals(),
    )


def _kind_of(deployment: Deployment) -> type[SimulatedFleet]:
    if deployment.division is not None:
        return DividedFleet
    return SimulatedFleet if deployment.shared_kv is None else SharingFleet


def _own_tokens(request_id: int) -> int:
    """Start of a token range that no session or other request uses."""
    return (1 << 60) + request_id * SESSION_TOKENS


def _session_tokens(workload: Workload) -> Callable[[int, int], int]:
    """Sampled tokens by (request, position): the next turn of the session repeats them."""
    sessions, branching = workload.sessions.tolist(), workload.branching

    def token_of(request_id: int, position: int) -> int:
        session = sessions[request_id]
        if branching:
            return _own_tokens(request_id) + position
        return session * SESSION_TOKENS + position if session >= 0 else 0

    return token_of
