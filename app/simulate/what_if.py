"""`legato replay LOG --policy ...`: recorded traffic under another configuration, simulated.

Three runs stand side by side: what happened, the same configuration simulated (how far the
simulation is to be believed), and the other configuration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from actors.scheduling.config import LIVE_KEYS, ConfigError, SchedulerConfig
from actors.scheduling.cost.model import CostModel
from actors.scheduling.event_log import Row
from app.simulate.hardware.live_log import slowdown
from app.simulate.run.record import Floats, RunRecord, Summary, summarize
from app.simulate.run.recorded import Recorded, measured_deployment, read_traffic
from app.simulate.run.simulation import Deployment, simulate
from app.simulate.tables import number

_ROWS = (
    ("requests completed", "num_completed", 1),
    ("requests refused", "num_refused", 1),
    ("TTFT P50, ms", "ttft_p50", 1000),
    ("TTFT P99, ms", "ttft_p99", 1000),
    ("TBT P50, ms", "tbt_p50", 1000),
    ("TBT P99, ms", "tbt_p99", 1000),
    ("TBT longest, ms", "tbt_max", 1000),
    ("completed, requests/s", "qps_completed", 1),
    ("in time, requests/s", "goodput", 1),
    ("output, tokens/s", "output_tokens_per_s", 1),
    ("preemptions", "num_preemptions", 1),
    ("mean step, ms", "mean_step_s", 1000),
)


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The three runs, judged by the same objectives. notes: what the figures rest on, in words."""

    happened: Summary
    simulated: Summary
    changed: Summary
    notes: tuple[str, ...]

    @property
    def runs(self) -> Mapping[str, Summary]:
        return {
            "happened": self.happened,
            "simulated as it was": self.simulated,
            "simulated what if": self.changed,
        }

    def to_dict(self) -> dict[str, Any]:
        runs = {name: summary.to_dict() for name, summary in self.runs.items()}
        return {"runs": runs, "notes": list(self.notes)}


def what_if(
    rows: Sequence[Row], changes: Mapping[str, Any], cost_model: CostModel | None = None
) -> WhatIf:
    """The traffic of a log under changed settings (keys as in `with_changes`).

    cost_model: step times of the changed run; those of both where the log carries none. Raises
    ConfigError for a setting that cannot be or that changes nothing, ValueError where there is no
    cost model or no traffic.
    """
    recorded = read_traffic(rows)
    own = recorded.config.cost_model
    profile = cost_model if own is None else CostModel.from_dict(own)
    if profile is None:
        raise ValueError("the log carries no cost model: give one with --cost-model")
    if own is None and not changes:
        raise ValueError("nothing is asked: give --policy, --budget or another setting")
    has_tier = recorded.config.tier_ranks > 0
    own_config = dataclasses.replace(recorded.config, tier_ranks=0, tier_shared=False)
    config = changed_config(own_config, changes)
    if recorded.steps:
        as_it_was = measured_deployment(own_config, profile, recorded.steps)
    else:
        as_it_was = Deployment(own_config, profile)
    other = dataclasses.replace(as_it_was, config=config)
    if cost_model is not None and own is not None:
        other = Deployment(config, cost_model)
    objectives = recorded.objectives_s(config)
    happened = _judged(recorded.record, objectives)
    simulated, changed = (
        _judged(_simulated(recorded, deployment), objectives) for deployment in (as_it_was, other)
    )
    origin = "of the log" if own is not None else "given, as the log carries none"
    notes = [f"cost model {origin}: {profile.name}"]
    if recorded.steps:
        ratio = slowdown(recorded.steps, profile).ratio
        notes.append(f"simulated steps take as long as the log's: {ratio:.2f} of that model's")
    if other.model is not as_it_was.model:
        notes.append(f"what if: steps take what {other.model.name} says, as it is")
    if has_tier:
        notes.append("the second tier is not simulated: what it fetched is computed")
    return WhatIf(happened, simulated, changed, (*notes, *recorded.notes))


def _simulated(recorded: Recorded, deployment: Deployment) -> RunRecord:
    stages, model = deployment.config.num_stages, deployment.model
    if stages != model.num_stages:
        raise ValueError(
            f"the log is of {stages} pipeline stages, {model.name} of {model.num_stages}"
        )
    run = simulate(
        recorded.workload,
        deployment,
        requests=recorded.requests,
        token_of=recorded.token_of,
    )
    return run.record


def _judged(record: RunRecord, objectives_s: tuple[Floats, Floats]) -> Summary:
    tbt_s, ttft_s = objectives_s
    return summarize(record, tbt_objective_s=tbt_s, ttft_objective_s=ttft_s)


def changed_config(config: SchedulerConfig, changes: Mapping[str, Any]) -> SchedulerConfig:
    """The settings with these changes; raises ConfigError for one that changes nothing."""
    slots = max(config.most_requests, changes.get("max_requests", 0))
    changed = dataclasses.replace(config, request_slots=slots).with_changes(changes)
    for key, value in changes.items():
        name = LIVE_KEYS[key.removeprefix("slo.")]
        if getattr(changed, name) == getattr(config, name):
            raise ConfigError(key, f"the log was recorded with {value}: nothing changes")
    return changed


def what_if_table(found: WhatIf) -> Table:
    table = Table(
        title="Recorded arrivals, judged by the objectives of what if", title_justify="left"
    )
    table.add_column("")
    for name in found.runs:
        table.add_column(name, justify="right")
    for name, figure, factor in _ROWS:
        values = [factor * getattr(summary, figure) for summary in found.runs.values()]
        table.add_row(name, *map(number, values))
    return table
