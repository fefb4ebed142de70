"""The paper's figures in its axes, from finished rows, the published values beside.

capacities (Figures 10, 11), objectives (12), interference (9), across_nodes (13), chunking (14),
ablation (Table 4)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from app.simulate.paper import published
from app.simulate.paper.published import PublishedRow
from app.simulate.run.plots import COLORS, plain

Rows = Sequence[PublishedRow]
COLOR_OF = {"orca": COLORS[6], "vllm": COLORS[0], "sarathi": COLORS[1], "vllm TP8": COLORS[5]}
DPI = 72  # of a notebook that stays small
PALE = "#EEEEEE"  # within the outlines of published bars
SLO_LABELS = {"strict": "SLO-S", "relaxed": "SLO-R"}


def read_rows(path: Path) -> list[PublishedRow]:
    """Rows of a report such as `results/paper.json`."""
    data = json.loads(path.read_text("utf-8"))["rows"]
    return [PublishedRow.from_dict(row) for row in data]


def _values(rows: Rows, figure: str) -> dict[tuple[str, str], PublishedRow]:
    """(setting, quantity) -> row."""
    return {(r.setting, r.quantity): r for r in rows if r.figure == figure}


def _grid(num_rows: int, num_columns: int, size: tuple[float, float]) -> tuple[Figure, Any]:
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    grid = figure.subplots(num_rows, num_columns, squeeze=False)
    for axes in grid.flat:
        plain(axes)
    return figure, grid


def _bars(
    axes: Any,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    colors: Sequence[str],
    published_names: Sequence[str] = (),
) -> None:
    """Grouped bars with their values; series named in published_names are outlines."""
    width = 0.84 / len(series)
    for index, (name, heights) in enumerate(series.items()):
        where = np.arange(len(groups)) + (index - (len(series) - 1) / 2) * width
        drawn = [(x, h) for x, h in zip(where, heights, strict=True) if h is not None]
        style: dict[str, Any] = {"color": colors[index]}
        if name in published_names:
            style = {"facecolor": PALE, "edgecolor": colors[index]}
        bars = axes.bar(
            [x for x, _ in drawn], [h for _, h in drawn], width * 0.92, label=name, **style
        )
        axes.bar_label(bars, fmt="%.2g", fontsize=7, padding=1)
    axes.set_xticks(range(len(groups)), groups)
    axes.margins(y=0.14)
    axes.set_axisbelow(True)


def capacities(rows: Rows, figure_name: str) -> Figure:
    """Figure 10 or 11: capacity per scheduler under both objectives, deployments by datasets.

    The paper's values are drawn only as ratios to Orca, so the published bar is Orca's simulated
    capacity times the published ratio.
    """
    found = _values(rows, figure_name)
    settings = {setting for setting, _ in found}
    deployments = [d for d in published.DEPLOYMENTS if any(s.startswith(d.label) for s in settings)]
    figure, grid = _grid(len(published.DATASETS), len(deployments), (9.0, 5.8))
    names = [*published.SYSTEMS, "sarathi, published over Orca"]
    for column, d in enumerate(deployments):
        for line, dataset in enumerate(published.DATASETS):
            axes = grid[line][column]
            series: dict[str, list[float | None]] = {name: [] for name in names}
            for slo in published.SLOS:
                where = f"{d.label}, {dataset}, {slo}"
                for system in published.SYSTEMS:
                    series[system].append(found[where, f"{system} capacity, QPS"].simulated)
                ratio = found[where, "sarathi / orca"].published or 0.0
                series[names[-1]].append(ratio * (series["orca"][-1] or 0.0))
            colors = [*(COLOR_OF[s] for s in published.SYSTEMS), COLOR_OF["sarathi"]]
            _bars(axes, [SLO_LABELS[s] for s in published.SLOS], series, colors, names[-1:])
            axes.set_title(f"{d.label}\n{dataset}", loc="left", fontsize=10)
            axes.set_ylabel("capacity (QPS)")
    figure.legend(
        *grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False
    )
    return figure


def objectives(rows: Rows) -> Figure:
    """Figure 12: capacity against the objective; a star is best vLLM times the published ratio."""
    figure, grid = _grid(1, len(published.CURVE_OBJECTIVES), (9.0, 4.2))
    names = ("vllm 32", "vllm 64", "vllm 128", "sarathi 512", "sarathi 2048")
    colors = (COLORS[5], COLORS[0], COLORS[6], COLORS[1], COLORS[4])
    markers = ("v", "s", "x", "o", "^")
    found = _values(rows, "Figure 12")
    for axes, (model, limits_s) in zip(grid.flat, published.CURVE_OBJECTIVES.items(), strict=True):
        heights = {
            name: [
                found[f"{model}, P99 TBT {s:g} s", f"{name} capacity, QPS"].simulated
                for s in limits_s
            ]
            for name in names
        }
        for name, color, marker in zip(names, colors, markers, strict=True):
            axes.plot(limits_s, heights[name], marker=marker, color=color, label=name)
        for name, limit_s, budget, ratio in published.CURVE:
            if name == model:
                at = limits_s.index(limit_s)
                best = max(heights[n][at] for n in names if n.startswith("vllm"))
                axes.plot(
                    [limit_s], [best * ratio], "*", markersize=13, color="none",
                    markeredgecolor=colors[names.index(f"sarathi {budget}")],
                    label=f"sarathi {budget}, published: {ratio:g} x best vllm",
                )  # fmt: skip
        axes.set_title(model, loc="left", fontsize=10)
        axes.set_xlabel("P99 TBT objective (s)")
        axes.set_ylabel("capacity (QPS)")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=7)
    return figure


def interference(rows: Rows) -> Figure:
    """Figure 9: an iteration with a whole prompt, or a chunk, over one of decodes alone."""
    found = _values(rows, "Figure 9")
    settings = list(dict.fromkeys(s for s, _ in found if s != "largest"))
    figure, grid = _grid(1, 1, (9.0, 4.2))
    axes = grid[0][0]
    series = {
        "decode + full prefill": [
            found[s, "whole prompt / decode-only"].simulated for s in settings
        ],
        "decode + chunked prefill, 512": [
            found[s, "chunk of 512 / decode-only"].simulated for s in settings
        ],
    }
    _bars(axes, [_lines(s) for s in settings], series, (COLOR_OF["orca"], COLOR_OF["sarathi"]))
    axes.axhline(
        published.INTERFERENCE,
        color="black",
        linestyle=":",
        label=f"published: up to {published.INTERFERENCE}",
    )
    axes.set_ylabel("iteration / decode-only iteration")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def _lines(setting: str) -> str:
    """A setting such as "Yi-34B, 8 decodes at 1024, prompt 4096" as a label of three lines."""
    return "\n".join(setting.split(", ")[1:]).replace(" at ", "\nat ")


def across_nodes(rows: Rows) -> Figure:
    """Figure 13: Falcon-180B with TP 8 over two nodes: decodes (a) and capacity (b)."""
    figure, grid = _grid(1, 2, (9.0, 3.8))
    left, right = grid.flat
    ratio = next(r for r in rows if r.figure == "Figure 13a")
    _bars(
        left,
        ["TP4-PP2", "TP8"],
        {"simulated": (1.0, ratio.simulated), "published": (1.0, ratio.published)},
        (COLORS[5], COLORS[5]),
        ["published"],
    )
    left.set_ylabel("median TBT / that of TP4-PP2")
    left.set_title("(a) decode-only batches, 32 at 4k", loc="left", fontsize=10)
    left.legend(frameon=False)
    label = published.DEPLOYMENTS[3].label
    hybrid, wide = _values(rows, "Figure 11"), _values(rows, "Figure 13b")
    series: dict[str, list[float | None]] = {"vllm TP8": [], "vllm": [], "sarathi": []}
    for slo in published.SLOS:
        series["vllm TP8"].append(
            wide[f"Falcon-180B, sharegpt4, {slo}", "vllm TP8 capacity, QPS"].simulated
        )
        for system in ("vllm", "sarathi"):
            row = hybrid[f"{label}, sharegpt4, {slo}", f"{system} capacity, QPS"]
            series[system].append(row.simulated)
    strict = series["vllm TP8"][0] or 0.0
    star = "sarathi, published over TP8"
    named = {"vllm TP8": series["vllm TP8"], "vllm TP4-PP2": series["vllm"]}
    named |= {"sarathi TP4-PP2": series["sarathi"]}
    named[star] = [published.SARATHI_OVER_VLLM_TP8 * strict, None]
    colors = [COLOR_OF[s] for s in ("vllm TP8", "vllm", "sarathi", "sarathi")]
    _bars(right, [SLO_LABELS[s] for s in published.SLOS], named, colors, [star])
    right.set_ylabel("capacity (QPS)")
    right.set_title("(b) sharegpt4", loc="left", fontsize=10)
    right.legend(frameon=False, fontsize=7)
    return figure


def chunking(rows: Rows) -> Figure:
    """Figure 14: prefill time with chunks over that of a whole prompt (Yi-34B)."""
    found = _values(rows, "Figure 14")
    figure, grid = _grid(1, len(published.CHUNKING_MS), (9.0, 3.4))
    chunks = (512, 1024, 2048)
    for axes, prompt in zip(grid.flat, published.CHUNKING_MS, strict=True):
        chosen = [found[f"Yi-34B, prompt {prompt}, chunk {c}", "time / whole"] for c in chunks]
        series: dict[str, list[float | None]] = {
            "simulated": [r.simulated for r in chosen],
            "published": [r.published for r in chosen],
        }
        _bars(axes, [str(c) for c in chunks], series, (COLORS[1], COLORS[1]), ["published"])
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_ylim(0, 1.5)
        axes.set_title(f"prompt of {prompt}", loc="left", fontsize=10)
        axes.set_xlabel("chunk (tokens)")
    grid[0][0].set_ylabel("prefill time / without chunks")
    grid[0][0].legend(frameon=False, fontsize=8)
    return figure


def ablation(rows: Rows) -> Figure:
    """Table 4: TTFT and TBT of each technique alone and of both (Yi-34B)."""
    found = _values(rows, "Table 4")
    figure, grid = _grid(2, 2, (9.0, 6.0))
    for line, quantity in enumerate(("P50 TTFT, s", "P99 TBT, s")):
        for axes, dataset in zip(grid[line], published.DATASETS, strict=True):
            chosen = [found[f"Yi-34B, {dataset}, {p}", quantity] for p in published.ABLATION]
            series: dict[str, list[float | None]] = {
                "simulated": [r.simulated for r in chosen],
                "published": [r.published for r in chosen],
            }
            labels = [p.replace("_", "-") for p in published.ABLATION]
            _bars(axes, labels, series, (COLORS[0], COLORS[0]), ["published"])
            axes.set_title(dataset, loc="left", fontsize=10)
            axes.set_ylabel(quantity.replace(", s", " (s)"))
    grid[0][0].legend(frameon=False)
    return figure
