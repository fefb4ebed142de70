"""Results of `legato simulate` as tables, for the terminal and as Markdown for documents."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from app.simulate.paper.published import PublishedRow
from app.simulate.run.config_search import CandidateResult
from app.simulate.run.moved import MoveTotals
from app.simulate.run.record import Summary
from app.simulate.run.ways_search import LayoutResult


def number(value: float | None) -> str:
    """Three significant digits, or a dash."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:+.0%}"


def _published(row: PublishedRow) -> tuple[str, str]:
    """The published value or bound, and the deviation from it."""
    off = row.deviation
    held = row.bound and off == 0.0
    return f"{row.bound} {number(row.published)}".strip(), "holds" if held else percent(off)


def paper_table(rows: Iterable[PublishedRow]) -> Table:
    """Simulated beside published numbers; misses beyond 20 % stand out."""
    table = Table(title="The paper's evaluation, simulated", header_style="bold")
    for name in ("figure", "setting", "quantity"):
        table.add_column(name)
    for name in ("simulated", "published", "deviation"):
        table.add_column(name, justify="right")
    for row in rows:
        off = row.deviation
        style = "yellow" if off is not None and abs(off) > 0.2 else ""
        table.add_row(
            row.figure,
            row.setting,
            row.quantity,
            number(row.simulated),
            *_published(row),
            style=style,
        )
    return table


def paper_markdown(rows: Iterable[PublishedRow]) -> str:
    """Like `paper_table`, in Markdown."""
    lines = [
        "| figure | setting | quantity | simulated | published | deviation |",
        "|---|---|---|---:|---:|---:|",
    ]
    lines += [
        " | ".join((f"| {r.figure}", r.setting, r.quantity, number(r.simulated), *_published(r)))
        + " |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


SUMMARY_LINES = (
    ("requests completed", "num_completed", ""),
    ("requests refused", "num_refused", ""),
    ("offered load", "qps_offered", "QPS"),
    ("output", "output_tokens_per_s", "token/s"),
    ("TTFT P50", "ttft_p50", "s"),
    ("TTFT P99", "ttft_p99", "s"),
    ("TBT P50", "tbt_p50", "s"),
    ("TBT P99", "tbt_p99", "s"),
    ("TBT longest", "tbt_max", "s"),
    ("scheduling delay P50", "scheduling_delay_p50", "s"),
    ("end to end P50", "e2e_p50", "s"),
    ("goodput", "goodput", "QPS"),
    ("preemptions", "num_preemptions", ""),
    ("steps", "num_steps", ""),
    ("mean step", "mean_step_s", "s"),
    ("bubbles", "bubble_share", "of stage time"),
)


def summary_table(summary: Summary, title: str) -> Table:
    table = Table(title=title, show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_column("unit")
    for label, name, unit in SUMMARY_LINES:
        table.add_row(label, number(getattr(summary, name)), unit)
    return table


def verdict_table(verdicts: Sequence[CandidateResult], load_qps: float) -> Table:
    """Configurations, cheapest first."""
    table = Table(title=f"Configurations for {load_qps:g} QPS, cheapest first", header_style="bold")
    table.add_column("configuration", no_wrap=True)
    for name in ("capacity QPS", "replicas", "devices", "P99 TBT s", "P50 TTFT s"):
        table.add_column(name, justify="right")
    table.add_column("stopped by")
    for v in verdicts:
        if v.impossible:
            table.add_row(v.candidate.label, "-", "-", "-", "-", "-", v.impossible, style="dim")
        else:
            table.add_row(
                v.candidate.label,
                number(v.capacity_qps),
                str(v.num_replicas),
                str(v.num_devices),
                number(v.tbt_p99),
                number(v.ttft_p50),
                v.limit,
            )
    return table


def layout_table(results: Sequence[LayoutResult], num_gpus: int) -> Table:
    """Layouts, those that hold most first; latencies each at its own capacity."""
    table = Table(title=f"On {num_gpus} GPUs, each at its capacity", header_style="bold")
    table.add_column("engines", no_wrap=True)
    for name in ("QPS per GPU", "TTFT P50 s", "TTFT P99 s", "TBT P99 ms"):
        table.add_column(name, justify="right")
    table.add_column("stopped by", min_width=10)
    for result in results:
        at = result.figures
        table.add_row(
            f"{result.layout.label}\n{result.layout.engines}",
            number(result.qps_per_gpu),
            *(
                (number(at.ttft_p50), number(at.ttft_p99), number(1e3 * at.tbt_p99))
                if at
                else "---"
            ),
            result.limit,
        )
    return table


def moves_line(moved: MoveTotals) -> str:
    """What streams that changed their engine lost, in words."""
    found = moved.to_dict()
    return (
        f"{moved.num_streams} streams moved, {moved.num_copied} of them behind their KV "
        f"({moved.num_bytes / 1e9:.3g} GB in all); {moved.num_recomputed_tokens} tokens computed "
        f"again; pauses P50 {found['pause_p50_s']:.3g} s, longest {found['pause_max_s']:.3g} s"
    )


def show(console: Console, *parts: Any) -> None:
    for part in parts:
        console.print(part)
