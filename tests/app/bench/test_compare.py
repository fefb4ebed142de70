"""`legato bench compare`: medians over rounds, ratios to the first."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from app.bench.compare import _alone_s, _medians, _probe, _table
from app.bench.plan import ComparisonPlan, DecodeProbe, PrefillProbe, ServerPlan
from app.bench.report import MeasurementError
from app.cli.main import app

PLANS = Path(__file__).resolve().parents[3] / "configs/bench"


def test_rounds_are_paired_by_figure() -> None:
    rounds = [
        {"decode": 3.0, "stall": 10.0},
        {"decode": 1.0, "stall": 30.0},
        {"decode": 2.0, "stall": 20.0},
    ]
    assert _medians(rounds) == {"decode": 2.0, "stall": 20.0}


def test_the_table_has_the_ratio_of_the_first_to_each() -> None:
    medians = {"ours": {"decode": 10.0, "stall": 5.0}, "theirs": {"decode": 4.0}}
    console = Console(width=100)
    with console.capture() as captured:
        console.print(_table(medians))
    decode, stall = captured.get().splitlines()[-3:-1]
    assert "10" in decode
    assert "4 (2.50)" in decode
    assert "nan" in stall, "a probe that a server did not get has no figure"


@pytest.mark.parametrize("file", PLANS.glob("compare_*.yaml"), ids=lambda file: file.stem)
def test_a_shipped_plan_is_valid(file: Path) -> None:
    plan = ComparisonPlan.model_validate(yaml.safe_load(file.read_text()))
    assert any(server.command.startswith("legato") for server in plan.servers.values())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"model: x", "servers: Field required; model: Extra inputs are not permitted"),
        (b"\xff", "can't decode byte 0xff"),
    ],
)
def test_what_is_wrong_with_a_plan_is_said_in_a_line(
    text: bytes, said: str, tmp_path: Path
) -> None:
    (plan := tmp_path / "plan.yaml").write_bytes(text)
    result = CliRunner().invoke(app, ["bench", "compare", str(plan)], env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert said in result.output
    assert "pydantic" not in result.output


def test_a_plan_says_how_long_it_takes() -> None:
    plan = ComparisonPlan.model_validate(yaml.safe_load((PLANS / "compare_135m.yaml").read_text()))
    least_s, most_s = _alone_s(plan)
    assert plan.settle_s < least_s < most_s
    without = plan.model_copy(update={"capacity": None})
    assert _alone_s(without)[0] == 30.0 + plan.settle_s


def test_a_figure_that_one_round_lacks_is_that_of_the_others() -> None:
    assert _medians([{"decode": 3.0}, {"decode": 1.0, "stall": 4.0}, {}]) == {
        "decode": 2.0,
        "stall": 4.0,
    }


def test_a_server_that_fails_does_not_keep_others_from_being_measured(tmp_path: Path) -> None:
    plan, out = tmp_path / "plan.yaml", tmp_path / "out" / "report.json"
    dead = {"command": "false", "url": "http://127.0.0.1:9"}
    plan.write_text(yaml.safe_dump({"servers": {"first": dead, "second": dead}}))
    result = CliRunner().invoke(app, ["bench", "compare", str(plan), "--out", str(out)])
    assert result.exit_code == 1
    assert "not measured: first: 'false' ended" in " ".join(result.output.split())
    report = json.loads(out.read_text())
    assert list(report["failed"]) == ["first", "second"]
    assert report["medians"] == {}


class _Streams(BaseHTTPRequestHandler):
    """Answers a completion with as many events as it asks for."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        event = json.dumps({"choices": [{"index": 0, "text": "a", "finish_reason": None}]})
        self.wfile.write(f"data: {event}\n\n".encode() * asked["max_tokens"] + b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Streams) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_probe_that_fails_leaves_the_others_of_its_server(url: str) -> None:
    server, found = ServerPlan(command="", url=url), dict[str, float]()
    plan = ComparisonPlan(
        servers={"it": server},
        decode=DecodeProbe(streams=[2], prompt_tokens=4, output_tokens=1),
        prefill=PrefillProbe(prompt_tokens=8, repeats=1),
        stall=None,
        capacity=None,
    )
    with pytest.raises(MeasurementError, match="1 are so few"):
        _probe(server, plan, "m", found)
    assert list(found) == ["prefill 8, tokens/s"]
