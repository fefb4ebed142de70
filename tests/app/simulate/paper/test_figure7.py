"""The paper's example: golden schedules in figure7.md, and what each of them must show."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer
from typer.testing import CliRunner

from actors.scheduling.policies import POLICIES
from app.simulate.command import register
from app.simulate.paper import figure7
from app.simulate.paper.figure7 import example_config, run_example
from app.simulate.paper.timeline import as_text

ROOM = Path(figure7.__file__).parent
A, B, C, D = 1, 2, 3, 4


def test_the_document_is_what_the_core_does() -> None:
    assert (ROOM / "figure7.md").read_text("utf-8") == figure7.document(), (
        "run `make pictures` and look at what changed"
    )
    expected = figure7.pictures()
    assert {path.name for path in (ROOM / "pictures").iterdir()} == set(expected)
    for name, svg in expected.items():
        assert (ROOM / "pictures" / name).read_text("utf-8") == svg, name
        ElementTree.fromstring(svg)


def test_the_command_prints_and_writes_every_schedule(tmp_path: Path) -> None:
    app = typer.Typer()
    register(app)
    result = CliRunner().invoke(app, ["--figure7", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    for policy in POLICIES:
        assert as_text(run_example(policy), figure7.NAMES) in result.output
    assert (tmp_path / "figure7.md").read_text("utf-8") == figure7.document()
    assert {p.name for p in (tmp_path / "pictures").iterdir()} == set(figure7.pictures())


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_request_gets_every_token(policy: str) -> None:
    chart = run_example(policy)
    for _, request in figure7.example_requests():
        lane = next(lane for lane in chart.lanes if lane.request_id == request.request_id)
        prefill = sum(n for step, n in lane.tokens.items() if step not in lane.decodes)
        assert prefill == len(request.prompt)
        assert len(lane.decodes) == request.sampling.max_tokens - 1
        assert lane.end is not None


@pytest.mark.parametrize("policy", ["sarathi", "fair", "deadline", "shortest_first", "mlfq"])
def test_stall_free_policies_neither_stall_nor_overrun(policy: str) -> None:
    chart = run_example(policy)
    assert not any(chart.stalls(request) for request in (A, B, C, D))
    assert max(chart.step_tokens) <= example_config(policy).token_budget


def test_vllm_stalls_decodes_behind_prompts() -> None:
    chart = run_example("vllm")
    assert chart.stalls(A) == chart.stalls(B) == [3]
    assert chart.step_tokens[3] == 13 + 7  # both prompts, whole, nothing else


@pytest.mark.parametrize("policy", ["orca", "hybrid_only"])
def test_orca_makes_decodes_wait_inside_a_long_step(policy: str) -> None:
    chart = run_example(policy)
    assert not chart.stalls(A)
    assert max(chart.step_tokens) == 13 + 7 + 2  # whole prompts beside both decodes


def test_faster_transformer_admits_only_between_batches() -> None:
    chart = run_example("faster_transformer")
    lanes = {lane.request_id: lane for lane in chart.lanes}
    last_of_first_batch = max(max(lanes[A].tokens), max(lanes[B].tokens))
    assert min(min(lanes[C].tokens), min(lanes[D].tokens)) > last_of_first_batch


def test_chunked_only_never_mixes() -> None:
    chart = run_example("chunked_only")
    for step in range(len(chart.step_tokens)):
        kinds = {step in lane.decodes for lane in chart.lanes if step in lane.tokens}
        assert len(kinds) == 1
    assert chart.stalls(A)


def test_order_decides_between_the_newcomers() -> None:
    def first(policy: str) -> int:
        lanes = {lane.request_id: lane for lane in run_example(policy).lanes}
        return C if min(lanes[C].tokens) < min(lanes[D].tokens) else D

    assert first("sarathi") == C  # came first
    assert first("fair") == D  # of the tenant with nothing so far
    assert first("deadline") == D  # has the nearer deadline
    assert first("shortest_first") == D  # wants fewer tokens
    assert first("mlfq") == D  # its prompt fits a better level
