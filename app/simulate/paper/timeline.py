"""A schedule to look at: which request runs what in which step, as text and as a picture.

One row per request, one column per step: `d` a decode, a number that many prefill tokens, `-` not
in the step though started (a stall, unless the request is in another step in flight), `.` waiting
to start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from html import escape

from actors.scheduling.events import Emit, Event, Execute, Instruction, Refuse, Submit
from actors.scheduling.plan import StepPlan

Call = tuple[float, Event, list[Instruction]]  # now_s, event, what `handle` returned

_COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#eeca3b")


@dataclass(slots=True)
class Lane:
    """One request. Columns are step numbers; `end` is the first after its last output."""

    request_id: int
    num_prompt_tokens: int
    begin: int  # steps planned before it was submitted
    end: int | None = None
    tokens: dict[int, int] = field(default_factory=dict)  # step -> tokens of its slice
    decodes: set[int] = field(default_factory=set)  # steps in which the slice is a decode


@dataclass(slots=True)
class Timeline:
    lanes: list[Lane]
    step_tokens: list[int]  # tokens of each step

    def cell(self, lane: Lane, step: int) -> str:
        if step in lane.tokens:
            return "d" if step in lane.decodes else str(lane.tokens[step])
        if step < lane.begin or (lane.end is not None and step >= lane.end):
            return ""
        started = any(earlier < step for earlier in lane.tokens)
        return "-" if started else "."

    def stalls(self, request_id: int) -> list[int]:
        """Steps between two decodes of a request in which it got nothing."""
        lane = next(lane for lane in self.lanes if lane.request_id == request_id)
        if not lane.decodes:
            return []
        within = range(min(lane.decodes), max(lane.decodes))
        return [step for step in within if step not in lane.tokens]


def timeline(calls: Iterable[Call]) -> Timeline:
    """Collect the steps from a record of `handle` calls (a live log, a replay, a simulation)."""
    lanes: dict[int, Lane] = {}
    steps: list[int] = []
    for _, event, instructions in calls:
        if isinstance(event, Submit):
            request = event.request
            lanes[request.request_id] = Lane(request.request_id, len(request.prompt), len(steps))
        for instruction in instructions:
            if isinstance(instruction, Execute):
                _add_step(lanes, instruction.plan, len(steps))
                steps.append(instruction.plan.num_tokens)
            elif isinstance(instruction, Emit):
                for output in instruction.outputs:
                    if output.finish_reason is not None and output.request_id in lanes:
                        lanes[output.request_id].end = len(steps)
            elif isinstance(instruction, Refuse):
                lanes.pop(instruction.request_id, None)
    return Timeline(list(lanes.values()), steps)


def _add_step(lanes: Mapping[int, Lane], plan: StepPlan, step: int) -> None:
    for part in plan.named_slices:
        lane = lanes.get(part.request_id)
        if lane is not None:
            lane.tokens[step] = part.num_tokens
            if part.num_tokens == 1 and part.start >= lane.num_prompt_tokens:
                lane.decodes.add(step)


def as_text(chart: Timeline, names: Mapping[int, str] | None = None) -> str:
    """The table described at the top of this file, with the tokens of each step below."""
    names = names or {}
    rows = [["step", *(str(step) for step in range(len(chart.step_tokens)))]]
    for lane in chart.lanes:
        cells = (chart.cell(lane, step) for step in range(len(chart.step_tokens)))
        rows.append([names.get(lane.request_id, str(lane.request_id)), *cells])
    rows.append(["tokens", *(str(tokens) for tokens in chart.step_tokens)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = (
        row[0].ljust(widths[0])
        + " |"
        + "".join(cell.rjust(width + 1) for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def as_svg(
    chart: Timeline,
    names: Mapping[int, str] | None = None,
    title: str = "",
    fixed_cost: float = 4.0,
) -> str:
    """The timeline as a picture; a step's width is its duration (`fixed_cost` + its tokens).

    Solid: prefill. Light: decode. Hatched: a started request that gets nothing.
    """
    names = names or {}
    unit, height, left, top = 9.0, 24, 64, 30
    edges = [float(left)]
    for tokens in chart.step_tokens:
        edges.append(edges[-1] + unit * (fixed_cost + tokens) / 2)
    width, bottom = edges[-1] + 12, top + height * len(chart.lanes)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {bottom + 26}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        '<defs><pattern id="stall" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect width="6" height="6" fill="#f4d6d6"/>'
        '<rect width="2" height="6" fill="#d62728"/></pattern></defs>',
        f'<rect width="{width:.0f}" height="{bottom + 26}" fill="#ffffff"/>',
        f'<text x="8" y="18" font-weight="600">{escape(title)}</text>',
    ]
    for row, lane in enumerate(chart.lanes):
        y = top + height * row
        name = escape(names.get(lane.request_id, str(lane.request_id)))
        parts.append(f'<text x="8" y="{y + 16}">{name}</text>')
        color = _COLORS[row % len(_COLORS)]
        for step in range(len(chart.step_tokens)):
            cell = chart.cell(lane, step)
            if cell in ("", "."):
                continue
            fill, opacity = ("url(#stall)", 1.0) if cell == "-" else (color, 1.0)
            if cell == "d":
                opacity = 0.35
            x, w = edges[step] + 1, edges[step + 1] - edges[step] - 2
            parts.append(
                f'<rect x="{x:.1f}" y="{y + 2}" width="{w:.1f}" height="{height - 4}" rx="3" '
                f'fill="{fill}" fill-opacity="{opacity}"/>'
            )
            if cell != "-":
                ink = "#222222" if cell == "d" else "#ffffff"
                parts.append(
                    f'<text x="{x + w / 2:.1f}" y="{y + 16}" text-anchor="middle" '
                    f'fill="{ink}">{cell}</text>'
                )
    parts.append(
        f'<line x1="{left}" y1="{bottom + 4}" x2="{edges[-1]:.1f}" y2="{bottom + 4}" '
        'stroke="#888888"/>'
    )
    parts.append(f'<text x="{left}" y="{bottom + 20}" fill="#666666">time</text></svg>')
    return "\n".join(parts) + "\n"
