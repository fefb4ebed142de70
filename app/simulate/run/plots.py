"""Plots of runs. Every function returns a figure.

tbt_cdf, batch_composition, budget_trace, bubbles, capacity_bars

Figures are made without pyplot, so there is no window or global state; a notebook shows a returned
figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from app.simulate.run.record import Steps
from app.simulate.run.simulation import SimulatedRun

# Distinguishable without color vision (Okabe and Ito).
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def _axes(title: str, x: str, y: str, size: tuple[float, float] = (7.0, 4.0)) -> tuple[Figure, Any]:
    """One plot in a figure of `size` inches."""
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    plain(axes)
    return figure, axes


def plain(axes: Any) -> None:
    """A light grid, and no frame above and at the right."""
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def tbt_cdf(
    gaps: Mapping[str, Sequence[float] | NDArray[np.float64]],
    tbt_s: float | None = None,
    title: str = "Time between tokens",
    what: str = "time between tokens",
    of: str = "tokens",
) -> Figure:
    """Share of tokens that came later than x, on log axes to show the tail. what, of: for the axes,
    where the values are another time, one for each of something else."""
    figure, axes = _axes(title, f"{what} (s)", f"share of {of} above this")
    for color, (name, values) in zip(_cycle(), gaps.items(), strict=False):
        ordered = np.sort(np.asarray(values, np.float64))
        if not len(ordered):
            continue
        index = np.unique(np.geomspace(1, len(ordered), 600).astype(int)) - 1
        late = np.arange(1, len(ordered) + 1)[index] / len(ordered)
        axes.plot(ordered[::-1][index], late, label=name, color=color)
    axes.axhline(0.01, color="gray", linewidth=0.8)
    axes.text(0.995, 0.0105, "P99", transform=axes.get_yaxis_transform(), ha="right", va="bottom")
    if tbt_s is not None:
        axes.axvline(tbt_s, color="black", linestyle=":", label=f"objective {tbt_s:g} s")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.legend(frameon=False)
    return figure


def batch_composition(
    steps: Steps, window_s: tuple[float, float] | None = None, title: str = "What each step holds"
) -> Figure:
    """Decode and prefill tokens of the steps in a window (default: the middle 20 s)."""
    start, end, low, high = _window(steps, window_s, 20.0)
    chosen = (end > low) & (start < high)
    width = (end - start)[chosen]
    decode = np.frombuffer(steps.decode_tokens, np.int32)[chosen]
    prefill = np.frombuffer(steps.prefill_tokens, np.int32)[chosen]
    figure, axes = _axes(title, "time (s)", "tokens in the step", (9.0, 3.6))
    where = start[chosen]
    axes.bar(where, decode, width, align="edge", color=COLORS[0], label="decode")
    axes.bar(where, prefill, width, bottom=decode, align="edge", color=COLORS[1], label="prefill")
    axes.set_xlim(low, high)
    axes.legend(frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1.0, 1.0))
    return figure


def budget_trace(
    steps: Steps,
    tbt_s: float,
    window_s: tuple[float, float] | None = None,
    title: str = "Step time against the objective",
) -> Figure:
    """Tokens of each step (the budget in use) and its time against the objective."""
    start, end, low, high = _window(steps, window_s, 60.0)
    chosen = (end > low) & (start < high)
    tokens = np.frombuffer(steps.decode_tokens, np.int32) + np.frombuffer(
        steps.prefill_tokens, np.int32
    )
    figure = Figure(figsize=(9, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    above.set_title(title, loc="left")
    above.step(start[chosen], (end - start)[chosen], where="post", color=COLORS[0])
    above.axhline(tbt_s, color="black", linestyle=":", label=f"objective {tbt_s:g} s")
    above.set_ylabel("step, first to last stage (s)")
    above.legend(frameon=False)
    below.step(start[chosen], tokens[chosen], where="post", color=COLORS[1])
    below.set_ylabel("tokens in the step")
    below.set_xlabel("time (s)")
    below.set_xlim(low, high)
    plain(above)
    plain(below)
    return figure


def bubbles(shares: Mapping[str, float], title: str = "Pipeline time lost to bubbles") -> Figure:
    """Share of stage time spent waiting while other stages work, one bar per system."""
    figure, axes = _axes(title, "", "share of stage time (%)")
    names = list(shares)
    bars = axes.bar(names, [100 * shares[n] for n in names], color=COLORS[0], width=0.6)
    axes.bar_label(bars, fmt="%.1f")
    return figure


def capacity_bars(capacities: Mapping[str, Mapping[str, float]], title: str = "Capacity") -> Figure:
    """Grouped bars: setting -> system -> QPS."""
    figure, axes = _axes(title, "", "capacity (requests/s)", (9.0, 4.0))
    systems = list(dict.fromkeys(s for row in capacities.values() for s in row))
    width = 0.8 / max(len(systems), 1)
    for index, (system, color) in enumerate(zip(systems, _cycle(), strict=False)):
        where = np.arange(len(capacities)) + (index - (len(systems) - 1) / 2) * width
        heights = [row.get(system, 0.0) for row in capacities.values()]
        bars = axes.bar(where, heights, width * 0.95, label=system, color=color)
        axes.bar_label(bars, fmt="%.2g", fontsize=7)
    axes.set_xticks(range(len(capacities)), list(capacities))
    axes.legend(frameon=False, ncols=len(systems))
    return figure


def save_run(result: SimulatedRun, folder: Path) -> list[Path]:
    """Save the plots of one run as SVG files."""
    tbt_s = result.deployment.config.tbt_s
    gaps = np.frombuffer(result.record.gaps_s, np.float64)
    figures = {"tbt_cdf": tbt_cdf({"this run": gaps}, tbt_s)}
    steps = result.record.steps
    if steps is not None and len(steps):
        figures["batch_composition"] = batch_composition(steps)
        if tbt_s is not None:
            figures["budget_trace"] = budget_trace(steps, tbt_s)
    written = []
    for name, figure in figures.items():
        path = folder / f"{name}.svg"
        figure.savefig(path)
        written.append(path)
    return written


def _window(
    steps: Steps, window_s: tuple[float, float] | None, default_s: float
) -> tuple[NDArray[np.float64], NDArray[np.float64], float, float]:
    start = np.frombuffer(steps.start_s, np.float64)
    end = np.frombuffer(steps.end_s, np.float64)
    if window_s is None:
        # Around the step in the middle, or all steps where they took less.
        first, last = float(start.min()), float(end.max())
        low = float(start[len(start) // 2]) - default_s / 2
        low = max(first, min(low, last - default_s))
        window_s = (low, min(low + default_s, last))
    return start, end, *window_s


def _cycle() -> list[str]:
    return list(COLORS) * 10
