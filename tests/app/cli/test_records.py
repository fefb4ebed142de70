"""`legato explain` on the logs of two replicas, written by the telemetry that a server has."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from actors.scheduling.request import Objective
from actors.transport.messages import IterationRecord
from app.api.events import Deliveries, RequestInfo, RequestOutcome
from app.cli import records
from app.cli.main import app
from app.telemetry.live import KnownEngine, Telemetry
from app.telemetry.records import RecordLog

runner = CliRunner(env={"COLUMNS": "200"})


def _step(number: int, begin_s: float, done_s: float, prefill: int) -> IterationRecord:
    return IterationRecord(
        number, begin_s, done_s, None, 8, prefill, 9, ((begin_s, done_s),), 8, 0, 0, 9, 0, 0, 512
    )


def _replica(folder: Path, name: str, tbt_s: float, gap_s: float) -> None:
    """Twelve requests, each with a token at 1.0 and one after its own gap; one step in each."""
    telemetry = Telemetry("tiny", KnownEngine(Objective(tbt_s, 0.5)), RecordLog(folder / name, {}))
    telemetry.on_iterations([_step(6, 0.9, 0.999, 0), _step(7, 1.0, 1.0 + gap_s - 0.001, 300)])
    for number in range(12):
        info = RequestInfo(f"{name}-{number}", "/v1/completions", "", True, 7, 1)
        told = Deliveries([(1.0, 1, 0, 1), (1.0 + gap_s, 1, 0, 1)])
        telemetry.on_request_start(info, 0.8 if number else 0.0, told)
        telemetry.on_finish(info, RequestOutcome(200, "stop", 2, 0, 0.6 if number else 0.1), 2.0)
    telemetry.close()


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    _replica(tmp_path, "one", 0.1, 0.25)
    _replica(tmp_path, "two", 0.2, 0.4)
    return tmp_path


def test_it_says_how_many_why_and_which(logs: Path) -> None:
    result = runner.invoke(app, ["explain", str(logs)])
    assert result.exit_code == 0, result.output
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.output.splitlines()]
    assert "0 of 24 requests with an objective kept it" in result.output
    for objective in ("100 ms: 12 gaps", "200 ms: 12 gaps", "500 ms: 2 requests"):
        assert f"objective {objective} missed it" in result.output
    # The same step number means another step in the other replica.
    worst = [row for row in rows if len(row) == 8 and row[0].startswith(("one-", "two-"))]
    assert [row[1:] for row in worst] == [
        *[["prefill", "250", "7", "8", "300", "249", "–"]] * 10,
        *[["prefill", "400", "7", "8", "300", "399", "–"]] * 10,
    ]
    assert ["prefill", "2"] in rows  # a TTFT of 1 s, of which 0.1 s in the queue


def test_those_that_were_not_answered_kept_nothing(tmp_path: Path) -> None:
    """Neither who left the queue, nor a stream that failed midway, however fast it was so far."""
    telemetry = Telemetry("tiny", KnownEngine(Objective(0.1, 0.5)), RecordLog(tmp_path, {}))
    telemetry.on_iterations([_step(6, 0.9, 0.999, 0)])
    fast = [(1.0, 1, 0, 1), (1.05, 1, 0, 1)]
    for status, reason, tokens, end_s in (
        *[(200, "stop", fast, 1.06)] * 3,
        *[(500, "engine_lost", fast, 9.0)] * 3,
        (400, "invalid_request_error", fast, 9.0),  # its grammar ended where nothing may follow
        *[(200, "disconnect", [], 31.0)] * 5,
        *[(429, "overloaded", [], 0.8)] * 6,
    ):
        info = RequestInfo("r", "/v1/completions", "", True, 7, 1)
        telemetry.on_request_start(info, 0.8, Deliveries(list(tokens)))
        outcome = RequestOutcome(status, reason, len(tokens), 0, 0.1 if tokens else 0.0)
        timing = telemetry.on_finish(info, outcome, end_s)
        assert timing is not None
        assert timing.kept is (reason == "stop")
    telemetry.close()
    result = runner.invoke(app, ["explain", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "3 of 18 requests with an objective kept it\n" in result.output
    assert "Of the others, 6 were refused, 5 were left by their client, 4 failed" in result.output
    assert "TTFT objective 500 ms: 5 requests missed it" in result.output
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.output.splitlines()]
    assert ["no first token", "5"] in rows


def test_logs_without_a_column_of_a_later_version(logs: Path) -> None:
    for file in [*logs.rglob("iterations-*.parquet"), *logs.rglob("gaps-*.parquet")]:
        pq.write_table(pq.read_table(file).drop_columns(["engine"]), file)
    test_it_says_how_many_why_and_which(logs)


@pytest.mark.parametrize("columns", ["80", None])
def test_ids_are_whole(
    columns: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a narrow terminal in several lines; in a pipe in one."""
    name = "chatcmpl-0123456789abcdef0123456789abcdef-of-a-client-that-names-its-own-requests"
    _replica(tmp_path, name, 0.1, 0.25)
    environment = {"COLUMNS": columns, "FORCE_COLOR": None, "TTY_COMPATIBLE": None}
    with CliRunner().isolation(env=environment):
        monkeypatch.setattr(records, "output", type(records.output)(highlight=False))
    result = CliRunner(env=environment).invoke(app, ["explain", str(tmp_path)])
    assert result.exit_code == 0, result.output
    tables = [line.split("│") for line in result.output.splitlines() if line.count("│") == 9]
    firsts = [cells[1].strip() for cells in tables]
    if columns is None:
        assert f"{name}-3" in firsts
    else:
        assert max(map(len, result.output.splitlines())) <= 80
        assert f"{name}-3" in "".join(firsts)


@pytest.mark.parametrize("command", ["explain", "plot", "trace"])
def test_damaged_files_are_named_and_left_out(command: str, logs: Path, tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "out")) if command != "explain" else ()
    damaged = []
    for kind in ("requests", "iterations", "gaps"):
        (file,) = (logs / "two").glob(f"{kind}-*.parquet")
        empty = file.with_stem(f"{file.stem}0")
        empty.touch()
        file.write_bytes(file.read_bytes()[:-100])
        damaged += [] if kind == "gaps" and command != "explain" else [file, empty]
    if command == "trace":
        damaged = damaged[2:]
    ran = runner.invoke(app, [command, str(logs), *out])
    assert ran.exit_code == 0, ran.output
    said = [line for line in ran.stderr.splitlines() if line.endswith(": not readable, left out")]
    assert sorted(said) == sorted(f"{file}: not readable, left out" for file in damaged)
    if command == "explain":
        assert "0 of 12 requests" in ran.output
        assert "TBT objective 100 ms: 12 gaps" in ran.output
    ran = runner.invoke(app, [command, str(logs / "two"), *out])
    kind = "iterations" if command == "trace" else "requests"
    said_none = f"error: no {kind}-*.parquet below {logs / 'two'} is readable"
    assert (ran.exit_code, said_none in ran.stderr) == (1, True), ran.output


def test_a_step_of_two_stages_took_as_long_as_its_slowest(tmp_path: Path) -> None:
    """Which is what is predicted of it."""
    telemetry = Telemetry("tiny", KnownEngine(Objective(0.1)), RecordLog(tmp_path / "one", {}))
    stages_s = ((1.0, 1.08), (1.1, 1.22))
    step = _step(7, 1.0, 1.249, 300)._replace(predicted_s=0.115, stages_s=stages_s)
    telemetry.on_iterations([_step(6, 0.9, 0.999, 0), step])
    info = RequestInfo("late", "/v1/completions", "", True, 7, 1)
    telemetry.on_request_start(info, 0.8, Deliveries([(1.0, 1, 0, 1), (1.25, 1, 0, 1)]))
    telemetry.on_finish(info, RequestOutcome(200, "stop", 2, 0, 0.1), 2.0)
    telemetry.close()
    result = runner.invoke(app, ["explain", str(tmp_path)])
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.output.splitlines()]
    (worst,) = [row for row in rows if row and row[0] == "late"]
    assert worst[-2:] == ["120", "115"]


def test_a_front_s_gaps_are_told_by_engine(tmp_path: Path) -> None:
    log = RecordLog(tmp_path / "front", {})
    telemetry = Telemetry("tiny", KnownEngine(Objective(0.1)), log)
    for engine, prefill in (("left", 300), ("right", 0)):
        steps = [_step(6, 0.9, 0.999, 0), _step(7, 1.0, 1.249, prefill), _step(8, 1.25, 1.3, 0)]
        telemetry.on_iterations(steps, engine)
    for number, engine in enumerate(("left", "left", "right")):
        info = RequestInfo(f"r{number}", "/v1/completions", "", True, 7, 1)
        told = Deliveries([(1.0, 1, 0, 1), (1.25, 1, 0, 1)])
        told.places.append((0.9, 0, engine))
        telemetry.on_request_start(info, 0.8, told)
        telemetry.on_finish(info, RequestOutcome(200, "stop", 2, 0, 0.1), 2.0)
    telemetry.close()
    result = runner.invoke(app, ["explain", str(tmp_path)])
    assert result.exit_code == 0, result.output
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.output.splitlines()]
    assert ["left", "prefill", "2"] in rows
    (worst,) = [row for row in rows if row and row[0] == "r2"]
    assert worst[2:4] == ["right", "250"]


def test_pictures_and_tracks_of_each_engine(logs: Path, tmp_path: Path) -> None:
    result = runner.invoke(app, ["plot", str(logs), "--out", str(tmp_path / "plots")])
    assert result.exit_code == 0, result.output
    each = ("batch_composition-0", "batch_composition-1", "budget_trace-0", "budget_trace-1")
    assert {path.stem for path in (tmp_path / "plots").iterdir()} == {"max_tbt", *each}
    drawn = (tmp_path / "plots" / "max_tbt.svg").read_text()
    assert "<!-- longest time between tokens (s) -->" in drawn
    assert "<!-- share of requests with such a time above this -->" in drawn
    out = tmp_path / "trace.json"
    result = runner.invoke(app, ["trace", str(logs), "--out", str(out)])
    assert result.exit_code == 0, result.output
    events = json.loads(out.read_text())["traceEvents"]
    named = [e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"]
    assert named == ["one", "two"]


@pytest.mark.parametrize(
    ("command", "place", "said"),
    [
        ("trace", "no/trace.json", "no is not a folder"),
        ("trace", "file/trace.json", "file is not a folder"),
        ("trace", "folder", "folder: is a folder"),
        ("plot", "file", "file is not a folder"),
        ("plot", "file/a/plots", "file is not a folder"),
    ],
)
def test_a_place_where_nothing_can_be_written_is_named_before_logs_are_read(
    command: str, place: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    out = tmp_path / place
    ran = runner.invoke(app, [command, str(tmp_path), "--out", str(out)])  # it has no logs either
    assert (ran.exit_code, f"error: {out}: " in ran.output) == (2, True), ran.output
    assert said in ran.output


def test_a_write_that_fails_is_named(logs: Path) -> None:
    ran = runner.invoke(app, ["trace", str(logs), "--out", "/dev/full"])
    assert (ran.exit_code, "error: /dev/full: No space left" in ran.output) == (2, True)
    (logs / "plots/max_tbt.svg").mkdir(parents=True)
    ran = runner.invoke(app, ["plot", str(logs), "--out", str(logs / "plots")])
    said = f"error: {logs / 'plots/max_tbt.svg'}: Is a directory"
    assert (ran.exit_code, said in ran.output) == (2, True)


def test_wrong_logs_leave_nothing_behind(tmp_path: Path) -> None:
    for command in ("trace", "plot"):
        ran = runner.invoke(app, [command, str(tmp_path), "--out", str(tmp_path / "new")])
        assert (ran.exit_code, list(tmp_path.iterdir())) == (1, [])


def test_nothing_to_explain(tmp_path: Path) -> None:
    result = runner.invoke(app, ["explain", str(tmp_path)])
    assert result.exit_code == 1
    assert "no requests-*.parquet below" in result.output
    assert "set telemetry.directory in the config" in result.output
    RecordLog(tmp_path / "replica", {}).close()
    result = runner.invoke(app, ["explain", str(tmp_path)])
    assert result.exit_code == 1
    assert "logs are kept there, but no requests have ended yet" in result.output


@pytest.mark.parametrize("what_if", [[], ["--policy", "vllm"]])
def test_what_is_no_log_of_events_is_not_replayed(what_if: list[str], tmp_path: Path) -> None:
    other = "a log begins with its configuration, not with what is no event"
    for rows, found in ([{"ttft_s": 0.1}], other), ([], "the log is empty"):
        file = tmp_path / "requests-1.parquet"
        pq.write_table(pa.Table.from_pylist(rows), file)
        ran = runner.invoke(app, ["replay", str(file), *what_if])
        assert (ran.exit_code, f"{file}: {found}" in ran.output) == (2, True)


def test_a_folder_is_not_replayed_but_searched(tmp_path: Path) -> None:
    ran = runner.invoke(app, ["replay", str(tmp_path)])
    assert (ran.exit_code, "(it has none)" in ran.output) == (2, True), "not read as an empty log"
    (tmp_path / "settings.json").write_text("{}")
    first = tmp_path / "events-20260101-000000-0001.parquet"
    for logs in ("it has none", str(first)):
        ran = runner.invoke(app, ["replay", str(tmp_path)])
        said = f"{tmp_path} is a folder; give the first file of a log ({logs})"
        assert (ran.exit_code, said in ran.output) == (2, True)
        first.touch()


@pytest.mark.parametrize("command", ["explain", "plot", "trace"])
def test_a_folder_that_is_missing_is_named(command: str, tmp_path: Path) -> None:
    ran = runner.invoke(app, [command, str(tmp_path / "no")])
    assert (ran.exit_code, f"no folder '{tmp_path / 'no'}'" in ran.output) == (2, True)
