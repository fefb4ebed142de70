"""The example of Sarathi-Serve's figure 7 under every policy, and the document made of it.

A and B are decoding when C and D arrive with longer prompts. `legato simulate --figure7` prints the
schedules and writes `figure7.md` with its pictures (`--out app/simulate/paper`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from actors.scheduling.build import build_core
from actors.scheduling.config import SchedulerConfig
from actors.scheduling.events import Event, Execute, StepDone, Submit
from actors.scheduling.plan import StepPlan, StepResult
from actors.scheduling.policies import POLICIES
from actors.scheduling.request import Objective, Request, SamplingParams
from app.simulate.paper.timeline import Call, Timeline, as_svg, as_text, timeline

NAMES = {1: "A", 2: "B", 3: "C", 4: "D"}

_INTRODUCTION = """# The example of figure 7 under every policy

Figure 7 of the [Sarathi-Serve paper](https://arxiv.org/abs/2403.02310): A and B decode when C and D
arrive with longer prompts. One row is a request, one column a step; a cell is a decode (`d`) or a
number of prefill tokens, `-` a stall (a started request gets nothing), `.` a request that waits to
start. In the pictures a step is as wide as it is long, prefill is solid, decode is light and a
stall is hatched.

The budget is 8 tokens, one step runs at a time, and C and D arrive while step 2 runs. D belongs to
another tenant than the others and has a deadline: `fair` sees the one, `deadline` the other.

`legato simulate --figure7` runs the example and prints it; `make pictures` writes this page, and
`tests/app/simulate/paper/test_figure7.py` holds it to what the scheduling core does.
"""

_OPTIONS: dict[str, Mapping[str, Any]] = {
    "vllm": {"max_batched_tokens": 32},
    "hybrid_only": {"max_batched_tokens": 32},
    "mlfq": {"max_batch": 3},
}
_ORDER_OPTIONS: dict[str, Mapping[str, Any]] = {
    "mlfq": {"quantum_tokens": 4},
    "shortest_first": {"ageing_tokens_per_s": 0.0},
}


def example_config(policy: str) -> SchedulerConfig:
    """One stage, one step at a time, a budget of 8 tokens, memory for every request."""
    return SchedulerConfig(
        num_blocks=64,
        block_size=4,
        max_requests=4,
        max_model_len=64,
        max_step_tokens=32,
        token_budget=8,
        lookahead=False,
        prefix_cache=False,
        policy=policy,
        policy_options=_OPTIONS.get(policy, {}),
        order_options=_ORDER_OPTIONS.get(policy, {}),
    )


def example_requests() -> list[tuple[int, Request]]:
    """(step before which it arrives, request): prompt and output lengths as in the figure."""

    def request(
        number: int, prompt: int, output: int, tenant: str, ttft_s: float | None = None
    ) -> Request:
        return Request(
            request_id=number,
            prompt=tuple(range(100 * number, 100 * number + prompt)),
            sampling=SamplingParams(max_tokens=output),
            arrival_s=float(number),
            tenant=tenant,
            objective=Objective(ttft_s=ttft_s),
        )

    return [
        (0, request(1, 3, 7, "red")),
        (0, request(2, 4, 6, "red")),
        (2, request(3, 13, 4, "red")),
        (2, request(4, 7, 3, "blue", ttft_s=20.0)),
    ]


def run_example(policy: str) -> Timeline:
    """The schedule of the example under a policy."""
    core = build_core(example_config(policy))
    calls: list[Call] = []
    outstanding: deque[StepPlan] = deque()
    arrivals = deque(example_requests())
    steps_done = 0

    def send(event: Event) -> None:
        instructions = core.handle(event, float(len(calls)))
        calls.append((float(len(calls)), event, instructions))
        outstanding.extend(i.plan for i in instructions if isinstance(i, Execute))

    while arrivals or outstanding:
        while arrivals and arrivals[0][0] <= steps_done:
            send(Submit(arrivals.popleft()[1]))
        if outstanding:
            plan = outstanding.popleft()
            steps_done += 1
            tokens = tuple((part.request_id, 0) for part in plan.named_slices if part.samples)
            send(StepDone(StepResult(plan.step_id, tokens)))
    return timeline(calls)


def schedules() -> dict[str, Timeline]:
    """The example's schedule under every policy there is."""
    return {policy: run_example(policy) for policy in POLICIES}


def document() -> str:
    """`figure7.md`: every schedule as a picture and as text."""
    parts = [_INTRODUCTION]
    for policy, chart in schedules().items():
        text = as_text(chart, NAMES)
        parts.append(
            f"## `{policy}`\n\n![{policy}](pictures/{policy}.svg)\n\n```text\n{text}\n```\n"
        )
    return "\n".join(parts)


def pictures() -> dict[str, str]:
    """File name -> SVG."""
    return {f"{p}.svg": as_svg(chart, NAMES, title=p) for p, chart in schedules().items()}


def write(folder: Path) -> None:
    """`figure7.md` in `folder` and its pictures in `folder/pictures`; raises OSError."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    for name, svg in pictures().items():
        (folder / "pictures" / name).write_text(svg, encoding="utf-8")
    (folder / "figure7.md").write_text(document(), encoding="utf-8")
