"""Workloads: statistics as published, arrival processes as named, files read back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from app.simulate.workload import specs
from app.simulate.workload.arrivals import bursty, diurnal, fixed_interval, gamma, poisson
from app.simulate.workload.lengths import (
    arxiv_summarization,
    fixed_lengths,
    sharegpt4,
    zipf_lengths,
)
from app.simulate.workload.requests import Workload, concatenate, generate, multi_turn
from app.simulate.workload.traces import read_trace

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.parametrize(
    ("lengths", "expected", "cap"),
    [
        (sharegpt4(), (1730, 5696, 2088, 415, 834, 266), 8192),
        (arxiv_summarization(), (7059, 12985, 3638, 208, 371, 265), 16384),
    ],
)
def test_the_papers_workloads_match_their_published_statistics(
    lengths: object, expected: tuple[float, ...], cap: int
) -> None:
    drawn = generate(poisson(1.0), lengths, 20_000)  # type: ignore[arg-type]
    found = drawn.statistics()
    names = (
        "prompt_median",
        "prompt_p90",
        "prompt_std",
        "output_median",
        "output_p90",
        "output_std",
    )
    for name, value in zip(names, expected, strict=True):
        assert found[name] == pytest.approx(value, rel=0.04), name
    assert (drawn.prompt_tokens + drawn.output_tokens).max() <= cap


@pytest.mark.parametrize(
    ("arrivals", "cv"),
    [
        (poisson(4.0), 1.0),
        (gamma(4.0, 0.5), 0.5),
        (fixed_interval(4.0), 0.0),
        (gamma(4.0, 2.0), 2.0),
    ],
)
def test_arrivals_have_their_rate_and_regularity(arrivals: object, cv: float) -> None:
    times = generate(arrivals, fixed_lengths(1, 1), 20_000).arrival_s  # type: ignore[arg-type]
    gaps = np.diff(times)
    assert 1.0 / gaps.mean() == pytest.approx(4.0, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, abs=0.08)


def test_bursts_are_burstier_and_days_have_a_peak() -> None:
    burst = generate(bursty(5.0, burst=8.0), fixed_lengths(1, 1), 20_000)
    gaps = np.diff(burst.arrival_s)
    assert gaps.std() / gaps.mean() > 1.15
    assert burst.qps == pytest.approx(5.0, rel=0.25)
    day = generate(diurnal(1.0, swing=0.8, period_s=4000.0), fixed_lengths(1, 1), 8000).arrival_s
    phase = (day[day < 8000.0] % 4000.0) / 4000.0
    noon, night = ((phase > 0.4) & (phase < 0.6)).sum(), ((phase < 0.1) | (phase > 0.9)).sum()
    assert noon > 5 * night


def test_zipf_favors_short_totals_within_bounds() -> None:
    drawn = generate(poisson(1.0), zipf_lengths(), 5000)
    totals = drawn.prompt_tokens + drawn.output_tokens
    assert totals.min() >= 1024
    assert totals.max() <= 4096
    assert np.median(totals) < (1024 + 4096) / 2
    assert np.median(drawn.prompt_tokens / drawn.output_tokens) == pytest.approx(20, rel=0.05)


def test_equal_seeds_equal_requests_at_any_rate() -> None:
    slow, fast = (generate(poisson(q), sharegpt4(), 500, seed=3) for q in (0.5, 4.0))
    assert (slow.prompt_tokens == fast.prompt_tokens).all()
    assert slow.at_rate(4.0).qps == pytest.approx(4.0)
    assert not (
        generate(poisson(1.0), sharegpt4(), 500, seed=4).prompt_tokens == slow.prompt_tokens
    ).all()


def test_turns_of_a_session_repeat_what_was_said() -> None:
    chats = multi_turn(1.0, 4.0, fixed_lengths(50, 20), 40, max_total=400)
    assert (chats.prompt_tokens - chats.shared_tokens == 50).all()
    for session in range(40):
        mine = chats.sessions == session
        history = chats.prompt_tokens[mine] + chats.output_tokens[mine]
        assert (chats.shared_tokens[mine][1:] == history[:-1]).all()
        assert (history <= 400).all()


def test_phases_follow_each_other() -> None:
    first, second = (generate(fixed_interval(2.0), fixed_lengths(n, 1), 10) for n in (5, 9))
    joined = concatenate([first, second])
    assert joined.prompt_tokens.tolist() == [5] * 10 + [9] * 10
    assert joined.arrival_s[10] == pytest.approx(5.5)


def test_traces_are_read_from_csv_and_parquet(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "a.csv").write_text(
        "arrived_at,num_prefill_tokens,num_decode_tokens\n2.0,7,3\n0.5,9,1\n"
    )
    pq.write_table(
        pa.table({"prompt_tokens": [4, 5], "output_tokens": [1, 2]}), tmp_path / "b.parquet"
    )
    trace = read_trace(tmp_path / "a.csv")
    assert trace.arrival_s.tolist() == [0.5, 2.0]
    assert trace.prompt_tokens.tolist() == [9, 7]
    assert read_trace(tmp_path / "b.parquet", poisson(3.0)).output_tokens.tolist() == [1, 2]
    with pytest.raises(ValueError, match="rate"):
        read_trace(tmp_path / "b.parquet")
    (tmp_path / "c.csv").write_text("num_prefill_tokens\n3\n")
    with pytest.raises(ValueError, match="output_tokens"):
        read_trace(tmp_path / "c.csv", poisson(1.0))


def test_dates_of_a_trace_are_seconds_since_the_first(tmp_path: Path) -> None:
    """As in the Azure traces, whose column is named so; rows may come in any order."""
    file, head = tmp_path / "azure.csv", "TIMESTAMP,ContextTokens,GeneratedTokens"
    days = ("2023-11-16 18:17:04.4799600,10,2", "2023-11-16 18:17:03.9799600,9,1")
    file.write_text("\n".join((head, *days, "2023-11-17 18:17:03.9799600,11,3")))
    trace = read_trace(file)
    assert trace.arrival_s.tolist() == [0.0, 0.5, 86400.0]
    assert trace.prompt_tokens.tolist() == [9, 10, 11]
    assert read_trace(file, poisson(3.0)).prompt_tokens.tolist() == [10, 9, 11]
    for row in ("18:17:03,9,1", "at noon,9,1", ",9,1\n1.0,9,1", "1.0,9,", "2.0,2023-11-16,1"):
        file.write_text(f"{head}\n{row}\n")
        with pytest.raises(ValueError, match="does not hold a number in every row"):
            read_trace(file)


@pytest.mark.parametrize(
    ("columns", "message"),
    [(([0.0, 1.0], [1], [1, 1]), "different"), (([1.0, 0.0], [1, 1], [1, 1]), "ascend"),
     (([0.0], [0], [1]), "at least one")],
)  # fmt: skip
def test_impossible_workloads_are_refused(columns: tuple[list[float], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Workload(*(np.array(c) for c in columns))


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs/workloads").glob("*.yaml")), ids=lambda p: p.stem
)
def test_every_shipped_workload_loads(path: Path) -> None:
    assert len(specs.load_workload(path)) > 50


def test_a_trace_gives_lengths_to_draw_from(tmp_path: Path) -> None:
    file = tmp_path / "pairs.csv"
    file.write_text("num_prefill_tokens,num_decode_tokens\n80,8\n160,24\n")
    rng = np.random.default_rng(0)
    for text, pairs in ((f"{file}", {(80, 8), (160, 24)}), (f"{file}/8", {(10, 1), (20, 3)})):
        prompts, outputs = specs.parse_lengths(text)(64, rng)
        assert set(zip(prompts.tolist(), outputs.tolist(), strict=True)) == pairs
    file.write_text("num_prefill_tokens,num_decode_tokens\n")
    with pytest.raises(ValueError, match="no request"):
        specs.parse_lengths(str(file))
    with pytest.raises(OSError, match=r"missing\.csv"):
        specs.parse_lengths("missing.csv")


@pytest.mark.parametrize("name", ["pairs.csv", "pairs.csv/8", "drawn.yaml", "own.yaml/8"])
def test_a_digest_is_of_the_requests_wherever_they_are_kept(tmp_path: Path, name: str) -> None:
    file = tmp_path / "pairs.csv"
    (tmp_path / "drawn.yaml").write_text(f"lengths: {file}\nqps: 1\nrequests: 9\n")
    (tmp_path / "own.yaml").write_text(f"trace: {file}\nqps: 1\n")
    digests = list[str]()
    for num_tokens in (80, 90, 80):
        file.write_text(f"num_prefill_tokens,num_decode_tokens\n{num_tokens},8\n")
        digests.append(specs.digest_of(f"{tmp_path / name}"))
    assert digests[0] == digests[2] != digests[1]
    assert specs.digest_of("sharegpt4/8") == ""


def test_a_yaml_workload_that_names_itself_is_refused(tmp_path: Path) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    for file, other in ((first, second), (second, first)):
        file.write_text(f"lengths: {other}\nqps: 1\nrequests: 2\n")
    for _ in range(2):  # nothing is kept of the first attempt
        with pytest.raises(ValueError, match=r"second\.yaml: .*first\.yaml draws its lengths from"):
            specs.load_workload(first)


def test_a_yaml_workload_gives_lengths_and_its_own_pattern(tmp_path: Path) -> None:
    text = "configs/workloads/shift.yaml"
    own = specs.load_workload(text)
    pairs = {*zip(own.prompt_tokens.tolist(), own.output_tokens.tolist(), strict=True)}
    drawn = specs.TrafficSpec(text, num_requests=64).read()
    found = [drawn.at(qps) for qps in (1.0, 5.0)]
    for load in found:
        assert {*zip(load.prompt_tokens.tolist(), load.output_tokens.tolist(), strict=True)} < pairs
    assert found[0].prompt_tokens.tolist() == found[1].prompt_tokens.tolist()
    assert found[1].qps == pytest.approx(5.0, rel=0.3)
    as_written = specs.TrafficSpec(text, "trace", num_requests=64).read().at(5.0)
    assert as_written.arrival_s.tolist() == own.arrival_s.tolist()
    assert as_written.prompt_tokens.tolist() == own.prompt_tokens.tolist()


def test_traffic_arrives_as_its_process_says() -> None:
    even = specs.TrafficSpec("fixed:9,9", "fixed", 10).read().at(4.0)
    assert np.diff(even.arrival_s) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1, 2]", "expected a mapping"),
        ("lengths: [", "while parsing"),
        ("lengths: sharegpt4", "missing key 'qps'"),
        ("{lengths: 5, qps: 1, requests: 9}", "unknown length distribution '5'"),
        ("{lengths: zipf, qps: fast, requests: 9}", "fast"),
        ("phases: 3", "phases are a list"),
        ("{lengths: zipf, qps: 0, requests: 9}", "the rate must lie in"),
        ("{lengths: zipf, qps: .inf, requests: 9}", "the rate must lie in"),
        ("{lengths: zipf, qps: 1, requests: .inf}", "cannot convert float infinity"),
        ("{lengths: zipf, session_qps: 0, sessions: 9, turns: 2}", "session_qps must lie in"),
        ("{lengths: zipf, session_qps: 1, sessions: 9, turns: 0}", "turns must lie in"),
        ("{lengths: zipf, qps: 1, requests: 9, documents: 0}", "documents must lie in"),
        ("{lengths: zipf, qps: 1, requests: 0}", "no request"),
    ],
)
def test_malformed_yaml_is_refused_by_its_name(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "load.yaml"
    file.write_text(content)
    with pytest.raises(ValueError, match=rf"load\.yaml.*{message}"):
        specs.parse_lengths(f"{file}")


@pytest.mark.parametrize("name", ["workloads/chat.yaml", "gone.yml", "gone.yaml/8", "gone.csv"])
def test_a_file_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(OSError, match="No such file") as refusal:
        specs.parse_lengths(name)
    assert f"{refusal.value.filename}" == name.removesuffix("/8")


def test_a_pattern_needs_a_file() -> None:
    with pytest.raises(ValueError, match="'sharegpt4' is not a file"):
        specs.TrafficSpec("sharegpt4", "trace").read()
    with pytest.raises(ValueError, match="unknown arrival process 'sometimes'"):
        specs.TrafficSpec("sharegpt4", "sometimes").read()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "known: arxiv"),
        ("fixed:1", "argument"),
        ("fixed:a,b", "numbers"),
        ("zipf/x", "number must follow"),
        ("a/b", "known: arxiv"),
        ("fixed:inf,1", "'fixed': prompt must lie in"),
        ("fixed:nan,1", "prompt must lie in"),
        ("fixed:1,0", "output must lie in"),
        ("fixed:100,10/0", "fixed:100,10/0.: the number behind '/' must lie in"),
        ("fixed:100,10/nan", "the number behind '/' must lie in"),
        ("zipf:4096,1024", r"'zipf': high must lie in \[4096, "),
        ("zipf:1,9,inf", "theta must lie in"),
        ("uniform:9,1,2", r"high must lie in \[9, "),
        ("uniform:1,9,-1", "ratio must lie in"),
        ("mixed:2", r"share must lie in \[0, 1\]"),
    ],
)
def test_wrong_names_say_what_is_right(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        specs.parse_lengths(text)
    with pytest.raises(ValueError, match="unknown keys speed"):
        specs.build_workload({"lengths": "zipf", "qps": 1, "requests": 2, "speed": 1})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gamma:0", "'gamma': cv must lie in"),
        ("gamma:1e-200", "cv must lie in"),
        ("bursty:4,0,0", "'bursty': on_s must lie in"),
        ("bursty:-1", "burst must lie in"),
        ("bursty:4,10,inf", "off_s must lie in"),
        ("diurnal:0.6,0", "'diurnal': period_s must lie in"),
        ("diurnal:0.6,nan", "period_s must lie in"),
        ("diurnal:2", r"swing must lie in \[0, 1\]"),
    ],
)
def test_arguments_that_draw_no_arrivals_are_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        specs.parse_arrivals(text, 1.0)
    with pytest.raises(ValueError, match="the rate must lie in"):
        specs.parse_arrivals(text.partition(":")[0], 0.0)
