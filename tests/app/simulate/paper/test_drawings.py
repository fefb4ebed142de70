"""The paper's figures, drawn from the committed rows."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from app.simulate.paper import drawings

ROWS = drawings.read_rows(Path(drawings.__file__).parents[1] / "results/paper.json")


@pytest.mark.parametrize(
    ("figure", "num_axes", "num_bars"),
    [
        (drawings.capacities(ROWS, "Figure 10"), 4, 4 * 2 * 4),
        (drawings.capacities(ROWS, "Figure 11"), 4, 4 * 2 * 4),
        (drawings.objectives(ROWS), 2, 0),
        (drawings.interference(ROWS), 1, 6 * 2),
        (drawings.across_nodes(ROWS), 2, 4 + 7),
        (drawings.chunking(ROWS), 4, 4 * 3 * 2),
        (drawings.ablation(ROWS), 4, 4 * 3 * 2),
    ],
    ids=["10", "11", "12", "9", "13", "14", "table 4"],
)
def test_every_value_is_drawn(figure: Figure, num_axes: int, num_bars: int) -> None:
    assert len(figure.axes) == num_axes
    assert sum(len(axes.patches) for axes in figure.axes) == num_bars
    assert all(axes.get_ylabel() for axes in figure.axes[:1])


def test_published_values_stand_beside() -> None:
    curve = drawings.objectives(ROWS)
    stars = [line for axes in curve.axes for line in axes.lines if line.get_marker() == "*"]
    assert len(stars) == 2
    bars = drawings.capacities(ROWS, "Figure 10").axes[0]
    orca = next(r for r in ROWS if r.quantity == "orca capacity, QPS")
    assert bars.containers[3][0].get_height() == pytest.approx(2.78 * orca.simulated)


@pytest.mark.parametrize("draw", [drawings.interference, drawings.chunking, drawings.ablation])
def test_no_label_is_written_over_another(draw: Callable[[drawings.Rows], Figure]) -> None:
    figure = draw(ROWS)
    figure.draw_without_rendering()
    for axes in figure.axes:
        spans = sorted(
            tuple(label.get_window_extent().intervalx) for label in axes.get_xticklabels()
        )
        assert all(left[1] < right[0] for left, right in pairwise(spans))
