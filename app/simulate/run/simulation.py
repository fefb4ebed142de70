"""Run a workload through one simulated deployment: arrivals, replicas, routing, autoscaling.

run = simulate(workload, Deployment(scheduler_config(model, tbt_s=0.1), model))
run.summary().tbt_p99
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from actors.scheduling.build import build_core
from actors.scheduling.config import SchedulerConfig
from actors.scheduling.cost.model import CostModel
from actors.scheduling.cost.online import OnlineCostModel
from actors.scheduling.events import Submit
from actors.scheduling.request import Objective, Request, SamplingParams
from app.simulate.hardware.step_ratios import StepRatios
from app.simulate.run.autoscale import AutoscalePolicy, Autoscaler
from app.simulate.run.record import RunRecord, Summary, summarise
from app.simulate.run.replica import INFINITY, Replica, TokenOf
from app.simulate.run.routing import Router, make_router
from app.simulate.workload.requests import Workload

# Sessions draw their tokens from disjoint ranges, so that prefix caching finds true repeats only.
SESSION_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is simulated.

    model: the truth about step times. believed: what the cores are told (None: the truth).
    jitter: sigma of the log-normal noise on step times. host_s, ratios: see `Replica`.
    routing: "round_robin", "least_loaded", "power_of_two" or "slack".
    """

    config: SchedulerConfig
    model: CostModel
    believed: CostModel | None = None
    num_replicas: int = 1
    routing: str = "round_robin"
    autoscale: AutoscalePolicy | None = None
    jitter: float = 0.0
    host_s: float = 0.0
    ratios: StepRatios | None = None


@dataclass(slots=True)
class SimulatedRun:
    """A finished run: what was simulated, its record, and what the replicas cost."""

    deployment: Deployment
    workload: Workload
    record: RunRecord
    replicas: list[Replica]
    replica_seconds: float  # sum of the time replicas were up
    scaling: list[tuple[float, int]] = field(default_factory=list)  # (time, replicas wanted)

    def summary(self, *, skip: int = 0, ttft_objective_s: float | None = None) -> Summary:
        """Figures against the deployment's own TBT objective."""
        config = self.deployment.config
        return summarise(
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
    """The core's settings for a modelled deployment: memory, stages and cost model from `model`.

    Plans are made when a step ends (no lookahead), and a prompt is in one step at a time, as in the
    systems the paper compares.
    """
    if model.kv_tokens < block_size:
        raise ValueError(f"{model.name}: kv_tokens is {model.kv_tokens}, nothing could run")
    base = SchedulerConfig(
        num_blocks=model.kv_tokens // block_size,
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
    )
    return replace(base, **changes)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=20_000)
def _blank_prompt(num_tokens: int) -> tuple[int, ...]:
    return (0,) * num_tokens


def requests_of(workload: Workload, objective: Objective | None = None) -> Callable[[int], Request]:
    """Builds request `i` on demand: a day of traffic need not exist all at once."""
    arrivals = workload.arrival_s.tolist()
    prompts, outputs = workload.prompt_tokens.tolist(), workload.output_tokens.tolist()
    sessions = workload.sessions.tolist()
    plain = objective or Objective()

    def build(index: int) -> Request:
        session, length = sessions[index], prompts[index]
        if session < 0:
            prompt = _blank_prompt(length)
        else:
            base = session * SESSION_TOKENS
            prompt = tuple(range(base, base + length))
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
    """Run to the last token, to `until_s`, or until `should_stop(record, arrived)` says so.

    should_stop is asked once per 64 arrivals: a capacity probe that is lost need not be finished.
    requests, token_of: recorded ones, and what is sampled for them, instead of blank ones of the
        workload's lengths; ids count from 0.
    """
    record = RunRecord(len(workload), keep_steps)
    record.arrival_s = workload.arrival_s.tolist()
    fleet = _Fleet(deployment, workload, record, seed, token_of)
    build = requests_of(workload, objective) if requests is None else requests.__getitem__
    arrivals = [*record.arrival_s, INFINITY]
    scaler = fleet.scaler
    next_arrival_s, index = arrivals[0], 0
    while True:
        replica = fleet.earliest()
        step_s = replica.next_s if replica is not None else INFINITY
        if scaler is not None and scaler.next_s < min(step_s, next_arrival_s):
            if next_arrival_s == INFINITY and step_s == INFINITY:
                break
            fleet.scale(scaler.next_s)
            continue
        if step_s <= next_arrival_s:
            if step_s == INFINITY or step_s > until_s or replica is None:
                break
            replica.advance()
            fleet.touched(replica)
            continue
        if next_arrival_s > until_s:
            break
        fleet.submit(build(index), next_arrival_s)
        index += 1
        next_arrival_s = arrivals[index]
        if should_stop is not None and not index & 63 and should_stop(record, index):
            break
    fleet.close(max(record.end_s, arrivals[index - 1] if index else 0.0))
    return SimulatedRun(
        deployment, workload, record, fleet.all, fleet.replica_seconds, fleet.scaling
    )


class _Fleet:
    """The replicas of one run, the router before them and the autoscaler behind them."""

    def __init__(
        self,
        deployment: Deployment,
        workload: Workload,
        record: RunRecord,
        seed: int,
        token_of: TokenOf | None,
    ) -> None:
        self._deployment = deployment
        self._record = record
        self._seed = seed
        has_sessions = int(workload.sessions.max(initial=-1)) >= 0
        self._token_of = token_of or (_session_tokens(workload) if has_sessions else None)
        self.all: list[Replica] = []
        self.up: list[Replica] = []  # take new requests
        self._started_s: dict[int, float] = {}
        self.replica_seconds = 0.0
        self.scaling: list[tuple[float, int]] = []
        self._pending: list[float] = []  # when replicas being started will be ready
        self.router: Router = make_router(deployment.routing, seed)
        policy = deployment.autoscale
        self.scaler = Autoscaler(policy) if policy else None
        for _ in range(policy.min_replicas if policy else deployment.num_replicas):
            self._start(0.0)
        # One replica for the whole run needs no queue of replicas.
        self._alone = self.all[0] if policy is None and deployment.num_replicas == 1 else None
        self._heap: list[tuple[float, int, Replica]] = []
        self._order = 0

    def _start(self, now_s: float) -> None:
        d = self._deployment
        index = len(self.all)
        believed = OnlineCostModel(d.believed or d.model)
        replica = Replica(
            build_core(d.config, cost_model=believed),
            d.model,
            self._record,
            index=index,
            jitter=d.jitter,
            ratios=d.ratios,
            seed=self._seed,
            host_s=d.host_s,
            token_of=self._token_of,
        )
        self._started_s[index] = now_s
        self.all.append(replica)
        self.up.append(replica)

    def earliest(self) -> Replica | None:
        """The replica whose next event comes first."""
        if self._alone is not None:
            return self._alone
        heap = self._heap
        while heap:
            time_s, _, replica = heap[0]
            if replica.next_s == time_s:
                return replica
            heapq.heappop(heap)  # superseded by a later push
        return None

    def touched(self, replica: Replica) -> None:
        """A replica advanced or was given work: note its new time, retire it if only draining."""
        if self._alone is not None:
            return
        if replica.next_s != INFINITY:
            self._order += 1
            heapq.heappush(self._heap, (replica.next_s, self._order, replica))
        elif replica.num_live == 0 and self.scaler is not None and replica not in self.up:
            self._retire(replica, self._record.end_s)

    def submit(self, request: Request, now_s: float) -> None:
        replica = self.router.choose(self.up, request)
        self._record.replica[request.request_id] = replica.index
        replica.num_live += 1
        replica.submit(Submit(request), now_s)
        self.touched(replica)

    def scale(self, now_s: float) -> None:
        """Let the autoscaler look; start (after the cold start) and drain replicas."""
        scaler = self.scaler
        if scaler is None:
            return
        while self._pending and self._pending[0] <= now_s:
            self._start(self._pending.pop(0))
        wanted = scaler.decide(now_s, self.up, len(self._pending))
        self.scaling.append((now_s, wanted))
        have = len(self.up) + len(self._pending)
        self._pending += [now_s + scaler.policy.start_s] * (wanted - have)
        while len(self.up) > wanted and not self._pending:
            leaving = min(self.up, key=lambda r: r.num_live)
            self.up.remove(leaving)
            if leaving.num_live == 0:
                self._retire(leaving, now_s)

    def _retire(self, replica: Replica, now_s: float) -> None:
        started_s = self._started_s.pop(replica.index, None)
        if started_s is not None:
            self.replica_seconds += now_s - started_s

    def close(self, now_s: float) -> None:
        for started_s in self._started_s.values():
            self.replica_seconds += max(0.0, now_s - started_s)


def _session_tokens(workload: Workload) -> Callable[[int, int], int]:
    """What a conversation samples is what its next turn repeats."""
    sessions = workload.sessions.tolist()

    def token_of(request_id: int, position: int) -> int:
        session = sessions[request_id]
        return session * SESSION_TOKENS + position if session >= 0 else 0

    return token_of
