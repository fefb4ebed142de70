"""`legato trace`, `plot`, `replay`, `explain`: evaluation of a run's logs."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import typer
from rich.console import Console

from actors.engine.event_recorder import read_events
from actors.scheduling.event_log import ReplayMismatch, check_replay
from app.bench.terminal import output, table
from app.simulate.hardware.deployments import load_model
from app.simulate.what_if import what_if, what_if_table
from app.telemetry.causes import MEANINGS, Cause, why_late
from app.telemetry.records import read_records
from app.telemetry.trace import perfetto
from app.terminal import WRONG_USAGE, console, fail

_NUM_WORST = 10
Folder = Annotated[Path, typer.Argument(help="A `telemetry.directory`, or a replica's part of it.")]
Row = dict[str, Any]


def _files(folder: Path, kind: str) -> list[Path]:
    if not folder.is_dir():
        fail(f"no folder {str(folder)!r}", code=WRONG_USAGE)
    files = sorted(folder.rglob(f"{kind}-*.parquet"))
    if not files:
        fail(f"no {kind}-*.parquet below {folder}", _why_none(folder, kind))
    return files


def _why_none(folder: Path, kind: str) -> str:
    if next(folder.rglob("settings-*.json"), None) is None:
        return "set telemetry.directory in the config to keep logs"
    happened = "requests have ended" if kind == "requests" else "steps have run"
    return f"logs are kept there, but no {happened} yet, or none long enough ago to be written"


def _logs(folder: Path, kind: str) -> Iterator[tuple[Path, list[Row]]]:
    """The rows of each file, one file at a time: those of days do not fit into memory. A damaged
    one is named and left out: the others still explain much."""
    is_any = False
    for file in _files(folder, kind):
        try:
            rows = read_records(file, kind)
        except (OSError, pa.ArrowException):
            console.print(f"{file}: not readable, left out", markup=False)
            continue
        is_any = True
        yield file, rows
    if not is_any:
        fail(f"no {kind}-*.parquet below {folder} is readable")


def _rows(folder: Path, kind: str) -> Iterator[Row]:
    return (row for _, rows in _logs(folder, kind) for row in rows)


def _iterations(folder: Path) -> list[Row]:
    """All iteration rows below a folder; each row's engine is named with its part of the log."""
    found = []
    for file, rows in _logs(folder, "iterations"):
        part = file.parent.relative_to(folder).as_posix().removeprefix(".")
        found += [{**row, "engine": f"{part} {row['engine']}".strip()} for row in rows]
    return found


def _check_place(out: Path, *, is_folder: bool) -> None:
    """End the command, before it reads logs for a minute, if nothing can be written there. Makes
    nothing, because the logs may be wrong too."""
    place = str(out)
    if is_folder:
        while not os.path.lexists(place):
            place = os.path.dirname(place) or "."
    elif not os.path.exists(place):
        place = os.path.dirname(place) or "."
    in_folder = is_folder or place != str(out)
    if in_folder and not os.path.isdir(place):
        fail(f"{out}: {place} is not a folder", code=WRONG_USAGE)
    if not in_folder and os.path.isdir(place):
        fail(f"{out}: is a folder", code=WRONG_USAGE)
    if not os.access(place, os.W_OK | (os.X_OK if in_folder else 0)):
        fail(f"{out}: {place} is not writable", code=WRONG_USAGE)


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        fail(f"{error.filename or out}: {error.strerror or error}", code=WRONG_USAGE)


def trace(
    folder: Folder, out: Annotated[Path, typer.Option(help="File to write.")] = Path("trace.json")
) -> None:
    """Turn iteration logs into a trace for ui.perfetto.dev: engines, and a track per stage."""
    _check_place(out, is_folder=False)
    document = perfetto(_iterations(folder))
    with _writing(out):
        out.write_text(json.dumps(document))
    typer.echo(f"{out}: {len(document['traceEvents'])} events; open it at ui.perfetto.dev")


def replay(
    file: Annotated[Path, typer.Argument(help="The first events-*.parquet file of a log.")],
    policy: Annotated[str | None, typer.Option(help="What if: another policy.")] = None,
    order: Annotated[str | None, typer.Option(help="What if: another order.")] = None,
    budget: Annotated[str | None, typer.Option(help="What if: another budget.")] = None,
    token_budget: Annotated[
        int | None, typer.Option(help="What if: other tokens of a fixed or throttled budget.")
    ] = None,
    admission: Annotated[str | None, typer.Option(help="What if: another admission.")] = None,
    max_requests: Annotated[
        int | None, typer.Option(help="What if: other sequences that run together.")
    ] = None,
    tbt_ms: Annotated[float | None, typer.Option(help="What if: another TBT objective.")] = None,
    ttft_ms: Annotated[float | None, typer.Option(help="What if: another TTFT objective.")] = None,
    cost_model: Annotated[
        Path | None,
        typer.Option(help="What if: step times by this file, instead of those of the log."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="What if: print JSON.")] = False,
) -> None:
    """Run a recorded event log through a fresh core; exit 1 unless every plan is the same.

    With other settings: simulate the same arrivals, and compare the result with the recorded run.
    """
    given = {
        "policy": policy,
        "order": order,
        "budget": budget,
        "token_budget": token_budget,
        "admission": admission,
        "max_requests": max_requests,
        "slo.tbt_ms": tbt_ms,
        "slo.ttft_ms": ttft_ms,
    }
    changes = {key: value for key, value in given.items() if value is not None}
    if os.path.isdir(file):  # of which pyarrow would read all files
        logs = ", ".join(map(str, sorted(file.rglob("events-*-0001.parquet")))) or "it has none"
        fail(f"{file} is a folder; give the first file of a log ({logs})", code=WRONG_USAGE)
    try:
        if not changes and cost_model is None:
            if as_json:
                fail(
                    "--json: nothing is asked; give --policy, --budget or another setting",
                    code=WRONG_USAGE,
                )
            count = check_replay(read_events(file))
            typer.echo(f"{file}: {count} events replayed, every instruction identical")
            return
        model = None if cost_model is None else load_model(cost_model)
        found = what_if(read_events(file), changes, model)
    except ReplayMismatch as error:
        fail(f"{file}: {error}")
    except (OSError, ValueError) as error:
        if not os.path.exists(file):  # pyarrow says no more than the name
            fail(f"no file {str(file)!r}", code=WRONG_USAGE)
        fail(f"{file}: {error}", code=WRONG_USAGE)
    if as_json:
        typer.echo(json.dumps(found.to_dict()))
        return
    shown = Console(highlight=False)
    shown.print(what_if_table(found))
    for note in found.notes:
        shown.print(f"- {note}", markup=False)


def plot(
    folder: Folder,
    out: Annotated[Path, typer.Option(help="Folder for the pictures (SVG).")] = Path("plots"),
    tbt_ms: Annotated[float, typer.Option(help="Objective to draw.")] = 100.0,
) -> None:
    """Draw each engine's batches and step times, and the worst TBT of requests."""
    from app.simulate.run import plots
    from app.simulate.run.record import logged_steps

    _check_place(out, is_folder=True)
    worst = [r["max_tbt_s"] for r in _rows(folder, "requests") if r["max_tbt_s"]]
    title, what = "Longest TBT of each request", "longest time between tokens"
    of = "requests with such a time"  # one of a single token has none
    figures = {"max_tbt": plots.tbt_cdf({"requests": worst}, tbt_ms / 1000, title, what, of)}
    engines = logged_steps(_iterations(folder))
    for number, (engine, steps) in enumerate(engines.items()):
        end, of = (f"-{number}", f" of {engine}") if len(engines) > 1 else ("", "")
        title = f"What each step{of} holds"
        figures[f"batch_composition{end}"] = plots.batch_composition(steps, title=title)
        title = f"Step time{of} against the objective"
        figures[f"budget_trace{end}"] = plots.budget_trace(steps, tbt_ms / 1000, title=title)
    with _writing(out):
        out.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        with _writing(out / f"{name}.svg"):
            figure.savefig(out / f"{name}.svg")
        typer.echo(str(out / f"{name}.svg"))


def explain(folder: Folder) -> None:
    """Print why objectives were missed: how often, by cause, and the worst ten gaps of each."""
    objectives = ("ttft_objective_s", "tbt_objective_s")
    promised = [row for row in _rows(folder, "requests") if any(row[name] for name in objectives)]
    missed: list[tuple[_Number, Row]] = []
    if next(folder.rglob("gaps-*.parquet"), None) is not None:
        missed = [(_number(file, gap), gap) for file, rows in _logs(folder, "gaps") for gap in rows]
    steps: dict[_Number, list[Row]] = {number: [] for number, _ in missed}
    for file, rows in _logs(folder, "iterations"):
        for row in rows:
            if (number := _number(file, row)) in steps:
                steps[number].append(row)
    # Each with the step of its cause
    gaps = [(gap, _step_of(gap, steps[number])) for number, gap in missed]
    _print_kept(promised)
    for objective_s in sorted({gap["objective_s"] for gap, _ in gaps}):
        _print_gaps(
            objective_s, [found for found in gaps if found[0]["objective_s"] == objective_s]
        )
    for objective_s in sorted({row["ttft_objective_s"] for row in promised} - {None}):
        _print_late(objective_s, [r for r in promised if r["ttft_objective_s"] == objective_s])


def _print_kept(promised: list[Row]) -> None:
    ends = Counter(map(_end, promised))
    kept = sum(not _end(row) and bool(row["kept_objectives"]) for row in promised)
    output.print(f"{kept} of {len(promised)} requests with an objective kept it")
    if others := [f"{count} {end}" for end, count in ends.most_common() if end]:
        output.print(f"Of the others, {', '.join(others)}")


def _end(row: Row) -> str:
    """How a request ended that was not answered to its end; "" if it was."""
    if row["status"] == 200:
        return "were left by their client" if row["reason"] == "disconnect" else ""
    return "were refused" if row["status"] < 500 and row["ttft_s"] is None else "failed"


_Number = tuple[Path, str, int]  # a step's, by the replica's folder too: each numbers its own


def _number(file: Path, row: Row) -> _Number:
    return file.parent, row["engine"], row["step"]


def _step_of(gap: Row, of_number: Iterable[Row]) -> Row | None:
    """The gap's step. Numbers restart with a rebuilt scheduler, so the step must end in the gap."""
    found = (row for row in of_number if gap["from_s"] < row["done_s"] <= gap["to_s"])
    return next(found, None)


def _print_gaps(objective_s: float, gaps: list[tuple[Row, Row | None]]) -> None:
    counts = Counter(Cause(gap["cause"]) for gap, _ in gaps)
    rows = [(cause, MEANINGS[cause], str(count)) for cause, count in counts.most_common()]
    output.print(f"\nTBT objective {1e3 * objective_s:g} ms: {len(gaps)} gaps missed it")
    output.print(table("", ("cause", "", "gaps"), rows, num_words=2))
    worst = sorted(gaps, key=lambda found: found[0]["from_s"] - found[0]["to_s"])[:_NUM_WORST]
    # Of a front's engines; a lone one has no name.
    engines = Counter((gap["engine"], gap["cause"]) for gap, _ in gaps if gap["engine"])
    if engines:
        by_engine = [(*of, str(count)) for of, count in engines.most_common()]
        output.print(table("", ("engine", "cause", "gaps"), by_engine, num_words=2))
    cells = []
    for gap, step in worst:
        gap_ms = f"{1e3 * (gap['to_s'] - gap['from_s']):.0f}"
        where = (gap["engine"],) if engines else ()
        cells.append((gap["request_id"], gap["cause"], *where, gap_ms, *_contents(step)))
    words = ("request", "cause", *(("engine",) if engines else ()))
    columns = (*words, "gap ms", "step", "decode", "prefill", "ms", "predicted")
    output.print(f"The worst {len(worst)}, each with the step that contributed most to its cause:")
    output.print(table("", columns, cells, num_words=len(words)))


def _contents(step: Row | None) -> tuple[str, ...]:
    """The step, its tokens, the time of its slowest stage and the time predicted for that."""
    if step is None:
        return ("–",) * 5
    stages_s = [end_s - begin_s for begin_s, end_s in step["stages_s"] or ()]
    predicted_s = step["predicted_s"]
    return (
        str(step["step"]),
        str(step["num_decode_tokens"]),
        str(step["num_prefill_tokens"]),
        f"{1e3 * max(stages_s):.0f}" if stages_s else "–",
        "–" if predicted_s is None else f"{1e3 * predicted_s:.0f}",
    )


def _print_late(objective_s: float, requests: list[Row]) -> None:
    late = [row for row in requests if (row["ttft_s"] or row["e2e_s"]) > objective_s]
    if late:
        counts = Counter(
            why_late(row["ttft_s"], row["queued_s"]) if row["ttft_s"] else "no first token"
            for row in late
        )
        rows = [(cause, str(count)) for cause, count in counts.most_common()]
        output.print(f"\nTTFT objective {1e3 * objective_s:g} ms: {len(late)} requests missed it")
        output.print(table("", ("most of it", "requests"), rows))


def register(app: typer.Typer) -> None:
    app.command("trace")(trace)
    app.command("plot")(plot)
    app.command("replay")(replay)
    app.command("explain")(explain)
