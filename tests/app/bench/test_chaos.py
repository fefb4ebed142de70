"""What a chaotic run is judged by; the run itself is in tests/serve."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from app.api.schema.openapi import document
from app.bench.chaos import census
from app.bench.chaos.bad_bytes import bad_bytes
from app.bench.chaos.bad_requests import BadRequest, bad_requests
from app.bench.chaos.command import kinds_of
from app.bench.chaos.faults import FAULTS, Skipped, deck
from app.bench.chaos.figures import chaos_figures, pauses_s
from app.bench.chaos.fleet_faults import FLEET_FAULTS
from app.bench.chaos.fuzz import answers_within_s
from app.bench.chaos.own_server import OwnServer, engines_of, is_fleet
from app.bench.chaos.recovery import longest_gap_s
from app.bench.chaos.requests import ChaosAnswer, ChaosRequest, Verdict, draw_pool, judge
from app.bench.chaos.run import ChaosRecord, InjectedFault
from app.bench.chaos.soak import growth
from app.bench.report import MeasurementError
from app.cli.main import app
from app.settings.model_folder import SettingsError
from tests.app.bench.load.traces import trace

REQUEST = ChaosRequest(0, "greedy", "/v1/completions", {})


def answer(text: str = "one two", *, ended: bool = True, **fields: Any) -> ChaosAnswer:
    made = ChaosAnswer(REQUEST, 0.0, status=200, **fields)
    made.texts = {0: text}
    made.event_times_s = made.event_times_s or [float(n) for n in range(len(text))]
    if ended:
        made.finished, made.num_tokens = {0: "length"}, len(text)
    return made


def test_a_pause_is_that_of_streams_which_the_fault_found_running() -> None:
    found, ended = trace(0.0, 0.1, 0.2, 1.7, 1.8), trace(0.0, 0.1, 0.2)
    assert longest_gap_s([found, found], 0.3) == 1.5
    with pytest.raises(MeasurementError, match="had ended before"):
        longest_gap_s([found, ended], 0.3)
    with pytest.raises(MeasurementError, match="a stream failed: gone"):
        longest_gap_s([found, trace(0.0, 0.1, error="gone")], 0.3)


def test_an_equal_answer_is_exact() -> None:
    assert judge(answer(), answer()).is_exact


def test_tokens_that_did_not_come_are_lost() -> None:
    cut = answer("one", ended=False, error="the stream ended without its last event")
    assert judge(cut, answer()).num_lost == 4
    assert judge(answer("one"), answer()).num_lost == 4  # says that it is whole


def test_a_token_too_many_is_doubled_and_another_is_changed() -> None:
    assert judge(answer("one two two"), answer()).is_changed
    doubled = answer()
    doubled.num_tokens = 9
    assert judge(doubled, answer()).num_doubled == 2
    found = judge(answer("one tow"), answer())
    assert found == Verdict(is_changed=True, why="other text from character 5 on")


def test_a_stream_that_is_left_must_have_seen_the_beginning() -> None:
    assert judge(answer("one", ended=False, left=True), answer()).is_exact
    assert judge(answer("two", ended=False, left=True), answer()).is_changed


def test_one_pool_for_one_seed() -> None:
    pool = draw_pool(5, "demo", 20)
    assert pool == draw_pool(5, "demo", 20) != draw_pool(6, "demo", 20)
    kinds = {"canary", "greedy", "seeded", "json", "long", "chat", "leaving", "slow", "several"}
    assert {request.kind for request in pool} == kinds


def test_a_deck_holds_every_fault_by_its_weight() -> None:
    cards = deck(list(FAULTS), random.Random(1))
    assert {kind: cards.count(kind) for kind in FAULTS} == {k: f.weight for k, f in FAULTS.items()}


def test_faults_are_chosen_by_name() -> None:
    assert kinds_of("all") == list(FAULTS)
    assert kinds_of("none") == []
    assert kinds_of("stage killed,scheduler frozen") == ["stage killed", "scheduler frozen"]
    with pytest.raises(typer.BadParameter, match="sun spots"):
        kinds_of("stage killed,sun spots")
    assert kinds_of("all", FLEET_FAULTS) == list(FLEET_FAULTS)
    with pytest.raises(typer.BadParameter, match="fleet scaled"):
        kinds_of("replica paused", FLEET_FAULTS)


def test_a_fleet_is_told_by_its_config() -> None:
    assert is_fleet(Path("configs/serve/two_replicas.yaml"))
    assert not is_fleet(Path("configs/serve/demo.yaml"))
    with pytest.raises(SettingsError, match=r"no\.yaml"):
        is_fleet(Path("no.yaml"))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (None, "no Serve config: No such file or directory\n"),
        ({"fleet": {"way": "sideways"}}, "way"),
        ({"model": {"path": "/nowhere"}}, "/nowhere"),  # which the server says
    ],
)
def test_a_wrong_config_is_wrong_usage(
    tmp_path: Path, args: dict[str, Any] | None, said: str
) -> None:
    config = tmp_path / "serve.yaml"
    if args is not None:
        application = {"import_path": "app.main:build_app", "args": args}
        config.write_text(yaml.safe_dump({"applications": [application]}))
    log = ["--log", str(tmp_path / "log")]
    found = CliRunner().invoke(app, ["chaos", "--config", str(config), *log])
    assert found.exit_code == 2, found.output
    assert said in found.output


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("demo", {}),
        ("two_replicas", {"Engine": 2}),
        ("split", {"Engine-prefill": 1, "Engine-decode": 1}),
        ("two_models", {"Engine-dialogue": 1}),  # the console shows the first model's
        ("autoscaled", {"Engine": 1}),
    ],
)
def test_engines_are_those_of_all_roles(name: str, counts: dict[str, int]) -> None:
    application = yaml.safe_load(Path(f"configs/serve/{name}.yaml").read_text())["applications"][0]
    assert engines_of(application) == counts
    application["args"]["fleet"] = {"way": "sideways"}
    with pytest.raises(SettingsError, match="way"):
        engines_of(application)


class FleetServer(OwnServer):
    def status(self, within_s: float = 15.0) -> dict[str, Any]:
        return self.shown  # type: ignore[attr-defined, no-any-return]

    def redeploy(self, change: Callable[[dict[str, Any]], None]) -> None:
        change(self.application)  # type: ignore[attr-defined]


def test_a_deployment_with_several_engines_is_scaled(tmp_path: Path) -> None:
    server = FleetServer("", None, tmp_path, tmp_path, tmp_path)  # type: ignore[arg-type]
    server.engines_of = {"Engine-prefill": 1, "Engine-decode": 1}
    scaled = FLEET_FAULTS["fleet scaled"]
    with pytest.raises(Skipped, match="one alone"):
        scaled.strike(server, random.Random(1))
    server.engines_of = {"Engine-prefill": 1, "Engine-decode": 2}
    deployments = [{"name": name, "num_replicas": n} for name, n in server.engines_of.items()]
    server.application = {"deployments": deployments}  # type: ignore[attr-defined]
    server.shown = {"engines": [{"id": name, "state": "serving"} for name in "ab"]}  # type: ignore[attr-defined]
    lift = scaled.strike(server, random.Random(1))
    assert [d["num_replicas"] for d in deployments] == [1, 1]
    assert server.is_whole()
    lift()
    assert [d["num_replicas"] for d in deployments] == [1, 2]
    assert not server.is_whole()


def test_a_fleet_is_whole_with_all_its_engines_and_no_doomed_one(tmp_path: Path) -> None:
    server = FleetServer("", None, tmp_path, tmp_path, tmp_path)  # type: ignore[arg-type]
    serving = [{"id": name, "state": "serving"} for name in ("a", "b")]
    assert server.is_whole()  # no fleet
    server.engines_of = {"Engine": 2}
    for engines, doomed, is_whole in (
        (serving, "", True),
        (serving[:1], "", False),
        (serving, "b", False),
        ([*serving, {"id": "c", "state": "draining"}], "", False),
    ):
        server.shown, server.doomed = {"engines": engines}, frozenset(doomed)  # type: ignore[attr-defined]
        assert server.is_whole() == is_whole


def test_a_pause_is_the_longest_gap_around_a_fault() -> None:
    seen = answer("abcdef", event_times_s=[0.0, 1.0, 2.0, 6.0, 7.0, 12.0])
    assert pauses_s(InjectedFault("stage killed", at_s=2.5, recovered_s=6.5), [seen]) == [4.0]
    assert pauses_s(InjectedFault("stage killed", at_s=13.0, recovered_s=14.0), [seen]) == []


def test_figures_are_clean_only_without_loss_and_leak() -> None:
    survived = InjectedFault("stage killed", at_s=1.5, recovered_s=3.0)
    clean = chaos_figures(ChaosRecord([survived], [answer()]), [answer()], [], [])
    assert clean["is_clean"]
    assert (clean["num_survived"], clean["pauses_ms"]["longest"]) == (1, 1000.0)
    for seen, leaks in (
        (ChaosRecord([survived], [answer("one")]), []),
        (ChaosRecord([replace(survived, recovered_s=None)], [answer()]), []),
        (ChaosRecord([survived], [answer()]), ["2 KV blocks are not free"]),
    ):
        assert not chaos_figures(seen, [answer()], leaks, [])["is_clean"]


def test_leaks_are_named() -> None:
    before = census.Census(100, 100, {"stage": 1}, {"replica": 50}, {"replica": 400 << 20}, 16, {})
    assert census.leaks(before, before) == []
    after = replace(
        before,
        num_free_blocks=98,
        processes={"stage": 2},
        files={"replica": 90},
        memory_bytes={"replica": 500 << 20},
        shared_files=32,
    )
    found = "; ".join(census.leaks(before, after))
    for word in ("2 KV blocks", "2 processes of kind stage", "90 files", "100 MiB", "16 more"):
        assert word in found


def test_growth_is_after_the_warm_up() -> None:
    samples = [
        {"replica": size, "stage": 1000} for size in (10, 500, 1000, 1000, 1000, 1050, 1100, 1100)
    ]
    rows = growth(samples)
    assert rows["replica"]["percent"] == pytest.approx(10.0)
    assert rows["all"]["percent"] == pytest.approx(5.0)


def test_bad_requests_are_the_same_for_the_same_seed() -> None:
    schema = document("1", "demo", with_keys=False)
    drawn = list(itertools.islice(bad_requests(schema, 3, "demo"), 2000))
    assert drawn == list(itertools.islice(bad_requests(schema, 3, "demo"), 2000))
    assert len({bad.kind for bad in drawn}) == 12
    assert len({bad.path for bad in drawn}) >= 7
    raw = list(itertools.islice(bad_bytes(3), 500))
    assert raw == list(itertools.islice(bad_bytes(3), 500))
    assert len({bad.kind for bad in raw}) == 10


@pytest.mark.parametrize(
    ("path", "content", "num_tokens"),
    [
        ("/v1/completions", b'{"max_tokens":2}', 2),
        ("/v1/completions", b'{"max_tokens": 1000000000000000}', 2048),
        ("/v1/completions", b'{"max_tokens":' + b"9" * 5000 + b"}", 2048),
        ("/v1/chat/completions", b'{"max_tokens":2,"max_completion_tokens":70}', 70),
        ("/v1/chat/completions", b'{"max_tokens":null}', 2048),
        ("/v1/responses", b'{"max_output_tokens":9}', 9),
        ("/tokenize", b'{"prompt":"abc"}', 0),
    ],
)
def test_a_request_for_many_tokens_is_waited_for(
    path: str, content: bytes, num_tokens: int
) -> None:
    """What merely fills the context does not hang."""
    wait_s = answers_within_s(BadRequest("wrong value", path, content), context=2048)
    assert wait_s == pytest.approx(30.0 + 0.1 * num_tokens)
