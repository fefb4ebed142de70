"""What planning costs: `python -m app.bench.engine.planning [--json]`.

Two questions, answered on the live core with nothing mocked but the stages (which answer at once):
how long one event of a busy engine takes (answer taken, next step planned), and how many
generated tokens a second go through the core.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from actors.scheduling.build import build_core
from actors.scheduling.config import SchedulerConfig
from actors.scheduling.core import Core
from actors.scheduling.events import Event, Execute, StepDone, Submit
from actors.scheduling.plan import StepPlan, StepResult
from actors.scheduling.request import Request, SamplingParams

_PROMPT_TOKENS = 512
_OUTPUT_TOKENS = 1024  # long enough that the running set stays as it is while we measure


@dataclass(frozen=True, slots=True)
class PlanningCost:
    """One busy engine. CPU time per event (StepDone in, next Execute out), in microseconds."""

    policy: str
    num_running: int
    num_waiting: int
    num_stages: int
    p50_us: float
    p99_us: float
    ns_per_token: float


class _Engine:
    """A core whose stages answer every sampling slice with token 0."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.core: Core = build_core(config)
        self.outstanding: deque[StepPlan] = deque()
        self.now_s = 0.0

    def send(self, event: Event) -> None:
        self.now_s += 0.001
        for instruction in self.core.handle(event, self.now_s):
            if type(instruction) is Execute:
                self.outstanding.append(instruction.plan)

    def next_answer(self) -> StepDone:
        plan = self.outstanding.popleft()
        tokens = tuple([(part[0], 0) for part in plan.slices if part[3]])
        return StepDone(StepResult(plan.step_id, tokens))


def _requests(count: int, num_tenants: int = 8) -> Iterator[Request]:
    sampling = SamplingParams(max_tokens=_OUTPUT_TOKENS, stop_token_ids=(1, 2))
    for i in range(count):
        prompt = tuple(range(i, i + _PROMPT_TOKENS))
        yield Request(i, prompt, sampling, i * 1e-6, tenant=f"tenant {i % num_tenants}")


def measure_step(
    policy: str,
    num_running: int,
    num_waiting: int,
    *,
    num_stages: int = 1,
    prefix_cache: bool = True,
    num_events: int = 400,
) -> PlanningCost:
    """Fill an engine, let its prompts finish, then time `num_events` answers."""
    blocks = (num_running + 1) * (_PROMPT_TOKENS + _OUTPUT_TOKENS) // 16
    core_config = SchedulerConfig(
        num_blocks=blocks,
        max_requests=num_running,
        max_model_len=_PROMPT_TOKENS + _OUTPUT_TOKENS,
        max_step_tokens=8192,
        policy=policy,
        token_budget=2048,
        num_stages=num_stages,
        prefix_cache=prefix_cache,
        policy_options={"max_batch": num_running} if policy == "orca" else {},
    )
    engine = _Engine(core_config)
    for request in _requests(num_running + num_waiting):
        engine.send(Submit(request))
    while len(engine.core.view.decoding) < num_running:
        engine.send(engine.next_answer())
    for _ in range(2 * core_config.depth):
        engine.send(engine.next_answer())
    times_s: list[float] = []
    num_tokens = 0
    gc.collect()
    gc.disable()
    try:
        for _ in range(num_events):
            answer = engine.next_answer()
            num_tokens += len(answer.result.tokens)
            begin_s = time.thread_time()
            engine.send(answer)
            times_s.append(time.thread_time() - begin_s)
    finally:
        gc.enable()
    cuts = statistics.quantiles(times_s, n=100)
    return PlanningCost(
        policy,
        num_running,
        num_waiting,
        num_stages,
        p50_us=cuts[49] * 1e6,
        p99_us=cuts[98] * 1e6,
        ns_per_token=sum(times_s) / num_tokens * 1e9,
    )


def measure_all() -> list[PlanningCost]:
    """The busy engine of every kind, then growth with running and with waiting requests."""
    costs = [
        measure_step(policy, 256, 1000)
        for policy in ("sarathi", "vllm", "hybrid_only", "chunked_only", "fair", "deadline", "mlfq")
    ]
    costs.append(measure_step("sarathi", 256, 1000, num_stages=4))
    costs += [measure_step("sarathi", n, 1000) for n in (1, 16, 64, 128, 512, 1024)]
    costs += [measure_step("sarathi", 256, n) for n in (0, 100, 10_000)]
    return costs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    arguments = parser.parse_args()
    costs = measure_all()
    write = sys.stdout.write
    if arguments.json:
        write(json.dumps([asdict(cost) for cost in costs], indent=2) + "\n")
        return 0
    write(f"{'policy':14}{'running':>8}{'waiting':>8}{'stages':>7}")
    write(f"{'p50 us':>9}{'p99 us':>9}{'ns/token':>10}\n")
    for c in costs:
        write(f"{c.policy:14}{c.num_running:8}{c.num_waiting:8}{c.num_stages:7}")
        write(f"{c.p50_us:9.0f}{c.p99_us:9.0f}{c.ns_per_token:10.0f}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
