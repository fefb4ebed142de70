"""The example of Sarathi-Serve's figure 7 under every policy, and the documentation made of it.

A and B are decoding when C and D arrive with longer prompts. `python -m
app.simulate.paper.figure7` rewrites the pictures and timelines beside this file; a test keeps them
true.
"""

from __future__ import annotations

import sys
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

_BEGIN, _END = "<!-- figure 7: begin -->", "<!-- figure 7: end -->"

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
    """One stage, one step at a time, a budget of 8 tokens, memory for everybody."""
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
            tokens = tuple((part.request_id, 0) for part in plan.slices if part.samples)
            send(StepDone(StepResult(plan.step_id, tokens)))
    return timeline(calls)


def documentation() -> str:
    """The section of README.md between the markers."""
    parts = []
    for policy in POLICIES:
        text = as_text(run_example(policy), NAMES)
        parts.append(
            f"### `{policy}`\n\n![{policy}](pictures/{policy}.svg)\n\n```text\n{text}\n```\n"
        )
    return "\n".join(parts)


def pictures() -> dict[str, str]:
    """File name -> SVG."""
    return {f"{p}.svg": as_svg(run_example(p), NAMES, title=p) for p in POLICIES}


def with_section(readme: str, section: str) -> str:
    """`readme` with the text between the markers replaced."""
    head, _, rest = readme.partition(_BEGIN)
    _, _, tail = rest.partition(_END)
    return f"{head}{_BEGIN}\n{section}{_END}{tail}"


def main() -> int:
    room = Path(__file__).parent
    (room / "pictures").mkdir(exist_ok=True)
    for name, svg in pictures().items():
        (room / "pictures" / name).write_text(svg)
    readme = room / "README.md"
    readme.write_text(with_section(readme.read_text(), documentation()))
    sys.stdout.write(f"{len(POLICIES)} schedules written to {readme.name} and pictures/\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
