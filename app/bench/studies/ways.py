"""`legato bench ways`: prompts and streams on the same engines, on separate ones, or in between.

Simulated, at equal hardware: the same number of engines, each a deployment of the paper, behind one
router, with the adaptive budget. A load passes as in the paper: P99 TBT meets the objective, and
the median scheduling delay, the wait at a second engine included, is at most 2 s. Where engines are
divided, every division is tried and the best one counts.

Requests must arrive for several times as long as one takes: in a shorter run streams only gather,
and engines seem to need no time to decode.

With --cache each load and row is written when it is found, and none that is there is simulated
again: an interrupted search goes on, several commands may search a row each, and one that asks for
all of them reports them together.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from actors.fleet.roles import WAYS
from app.bench.report import make_report, publish
from app.bench.studies.ways_capacity import COMPARED, LEAST_REQUESTS, TOLERANCE, Case, study
from app.bench.studies.ways_ledger import Ledger, place_of
from app.bench.studies.ways_loads import DATASETS, OBJECTIVES, TIGHT_STEPS, work_of
from app.bench.terminal import Json, Out, console, output, table
from app.simulate.hardware.interconnect import INTERCONNECTS
from app.simulate.paper.published import DEPLOYMENTS
from app.simulate.tables import number

COLUMNS = (
    "deployment", "dataset", "slo", "way", "interconnect", "engines", "QPS/GPU", "over colocated",
    "limit", "TTFT", "P99 TTFT", "P99 TBT", "P99 longest gap", "GB/request",
)  # fmt: skip

# Of the second table in Markdown: figures, their format and unit in seconds.
LATENCIES = (
    ("ttft_p50_s", ".1f", 1.0), ("ttft_p99_s", ".1f", 1.0), ("tbt_p99_s", ".0f", 1e3),
    ("longest_gap_p99_s", ".1f", 1.0),
)  # fmt: skip


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A row of the table; latencies are those at the load that is compared."""
    there, over = row["compared"] or {}, row["over_colocated"]
    return (
        *(row[name] for name in ("deployment", "dataset", "slo", "way")),
        row["interconnect"] or "-",
        engines_of(row),
        f"{row['capacity_qps_per_gpu']:.3g}",
        number(over),
        row["limit"],
        *(
            number(there.get(name))
            for name in ("ttft_p50_s", "ttft_p99_s", "tbt_p99_s", "longest_gap_p99_s")
        ),
        number(there.get("moved_gb_per_request")),
    )


def engines_of(row: Mapping[str, Any]) -> str:
    """Engines for prompts + others.

    >>> engines_of({"prefill_engines": 1, "other_engines": 3})
    '1+3'
    """
    return f"{row['prefill_engines']}+{row['other_engines']}"


def as_markdown(rows: Iterable[Mapping[str, Any]]) -> str:
    """Two tables with one line per deployment, dataset, objective and link.

    The first one: the ways' capacities per GPU, the engines for prompts + others that were best,
    and the ratios to the colocated one. The second one: latencies under these loads.
    """
    by_line: dict[tuple[str, ...], dict[str, Mapping[str, Any]]] = {}
    lone: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for row in rows:
        case = tuple(row[name] for name in ("deployment", "dataset", "slo"))
        if row["way"] == "colocated":
            lone[case] = row
        else:
            by_line.setdefault((*case, row["interconnect"]), {})[row["way"]] = row
    labels = {d.model: d.label for d in DEPLOYMENTS}
    first = [
        "| deployment | lengths | objective | link | colocated | split | engines | flexible "
        "| engines | split / colocated | flexible / colocated |",
        "|---|---|---|---|---:|---:|---|---:|---|---:|---:|",
    ]
    second = [
        "| deployment | lengths | objective | link | TTFT P50, s | TTFT P99, s | TBT P99, ms "
        "| P99 of the longest gap, s |",
        "|---|---|---|---|---:|---:|---:|---:|",
    ]
    for line, found in by_line.items():
        three = [lone[line[:3]], found.get("split"), found.get("flexible")]
        per_gpu = [_shown(row, "capacity_qps_per_gpu", ".3g") for row in three]
        engines = [engines_of(row) if row else "-" for row in three]
        ratios = [_shown(row, "over_colocated", ".2f") for row in three]
        cells = [labels[line[0]], *line[1:], per_gpu[0]]
        cells += [per_gpu[1], engines[1], per_gpu[2], engines[2], *ratios[1:]]
        first.append(f"| {' | '.join(cells)} |")
        at = [row["at_capacity"] if row else None for row in three]
        times = [
            " / ".join(_shown(there, name, form, factor) for there in at)
            for name, form, factor in LATENCIES
        ]
        second.append(f"| {' | '.join([labels[line[0]], *line[1:], *times])} |")
    return "\n".join([*first, "", *second]) + "\n"


def _shown(figures: Mapping[str, Any] | None, name: str, form: str, factor: float = 1.0) -> str:
    value = (figures or {}).get(name)
    return "-" if value is None else format(factor * value, form)


def known_rows(
    ledger: Ledger,
    names: Sequence[str],
    sets: Sequence[str],
    slos: Sequence[str],
    links: Sequence[str],
    num_engines: int,
    seed: int,
) -> list[dict[str, Any]]:
    """Rows found earlier, in the order of a report. Requests may have arrived for another time."""
    order = itertools.product(names, sets, slos, WAYS, ("", *links))
    places = {place: number for number, place in enumerate(order)}
    found = [
        (places[place], row)
        for row in ledger.rows.values()
        if (place := place_of(row)) in places
        and row["prefill_engines"] + row["other_engines"] == num_engines
        and row["seed"] == seed
    ]
    return [row for _, row in sorted(found, key=lambda both: both[0])]


def chosen(given: str, known: Iterable[str], what: str) -> list[str]:
    """Names separated by commas; all if empty. Raises typer.BadParameter naming those there are."""
    names = given.split(",") if given else list(known)
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(f"unknown {what} {unknown[0]!r}; known: {', '.join(known)}")
    return names


def command(
    context: typer.Context,
    deployments: Annotated[
        str, typer.Option(help="Cost models of the paper, separated by commas; all if empty.")
    ] = "",
    datasets: Annotated[
        str, typer.Option(help="The paper's, `mixed` and `conversations`; all if empty.")
    ] = "",
    objectives: Annotated[
        str, typer.Option(help=f"The paper's, and {TIGHT_STEPS} decode steps; all if empty.")
    ] = "",
    ways: Annotated[str, typer.Option(help="Beside the colocated one; all if empty.")] = "",
    links: Annotated[str, typer.Option(help="Between engines; all if empty.")] = "",
    engines: Annotated[int, typer.Option(help="Engines of each way.", min=2)] = 4,
    seconds: Annotated[
        float, typer.Option(help="About how long requests arrive at colocated capacity.", min=1)
    ] = 600.0,
    seed: Annotated[int, typer.Option(help="Seed of the workload.")] = 0,
    cache: Annotated[
        Path | None, typer.Option(dir_okay=False, help="What was found; read and added to.")
    ] = None,
    earlier: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Report of an earlier run: a search begins at its capacity. Repeatable.",
        ),
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write the results as tables to this file.")
    ] = None,
    search: Annotated[
        bool, typer.Option(help="Search rows that are not in the cache; else report those there.")
    ] = True,
    compare: Annotated[
        bool, typer.Option(help=f"Latencies at {COMPARED:.0%} of colocated capacity too.")
    ] = True,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Capacity per GPU of colocated, split and flexible engines, simulated."""
    known = {d.model: d for d in DEPLOYMENTS}
    names = chosen(deployments, known, "deployment")
    sets, slos = chosen(datasets, DATASETS, "dataset"), chosen(objectives, OBJECTIVES, "objective")
    asked = chosen(ways, WAYS, "way")
    by_speed = sorted(INTERCONNECTS, key=lambda name: -INTERCONNECTS[name].bytes_per_s)
    joined = chosen(links, by_speed, "link")
    try:
        ledger = Ledger(cache, earlier or ())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    rows: list[dict[str, Any]] = []
    if not search:
        rows = known_rows(ledger, names, sets, slos, joined, engines, seed)
        publish(make_report(context, {"tolerance": TOLERANCE, "rows": rows}), False, out)
        names = []
    for name, dataset, slo in itertools.product(names, sets, slos):
        expected = seconds * work_of(name, dataset).qps(0, engines)
        case = Case(known[name], dataset, slo, engines, max(LEAST_REQUESTS, round(expected)), seed)
        for row in study(case, asked, joined, ledger, compare):
            rows.append(row)
            console.print(" ".join(cells(row)), soft_wrap=True)
        # What is done so far
        publish(make_report(context, {"tolerance": TOLERANCE, "rows": rows}), False, out)
    if markdown is not None:
        markdown.write_text(as_markdown(rows), "utf-8")
    if as_json:
        publish(make_report(context, {"tolerance": TOLERANCE, "rows": rows}), True, None)
    else:
        title = f"{engines} engines; latencies in s at {COMPARED:.0%} of colocated capacity"
        output.print(table(title, COLUMNS, [cells(row) for row in rows], num_words=6))
