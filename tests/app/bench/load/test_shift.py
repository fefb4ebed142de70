"""A load in phases: whose arrivals are whose, and what is said of each."""

from __future__ import annotations

import pytest
import typer

from app.bench.load.shift import CHAT_DOCUMENTS_CHAT, parse_phases, phase_figures
from app.bench.report import MeasurementError
from tests.app.bench.load.traces import trace


def test_phases_follow_each_other_without_a_pause() -> None:
    phases = parse_phases(CHAT_DOCUMENTS_CHAT, 30.0)
    for number, phase in enumerate(phases):
        arrivals = [job.arrival_s for job in phase.jobs()]
        assert arrivals == sorted(arrivals)
        assert 30.0 * number == arrivals[0] < arrivals[-1] < 30.0 * (number + 1)
        assert len(arrivals) == 30.0 * phase.load.qps
    chat, documents, again = (phase.jobs() for phase in phases)
    mean = [sum(j.num_prompt_tokens for j in jobs) / len(jobs) for jobs in (chat, documents, again)]
    assert mean[1] > 2 * max(mean[0], mean[2])
    assert [j.num_prompt_tokens for j in chat] != [j.num_prompt_tokens for j in again]


def test_no_request_of_a_phase_arrives_in_the_next() -> None:
    phases = parse_phases("64x8@0.01,512x8@1", 10.0)
    assert [job.arrival_s for job in phases[0].jobs()] == [0.0]


@pytest.mark.parametrize("text", ["", "64x8", "64x8@", "64x8@0", "64x8@-1", "@2", "64x8@2,"])
def test_what_is_no_phase_is_refused_by_name(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="LENGTHS@QPS"):
        parse_phases(text, 10.0)


def test_a_request_counts_where_it_arrived() -> None:
    phases = parse_phases("64x8@1,512x8@1", 10.0)
    early, late = trace(9.0, 9.5, 10.5), trace(11.0, 11.5, 11.55)
    (first, first_kept), (second, second_kept) = phase_figures([early, late], phases, tbt_ms=100)
    assert (first.tbt_max_ms, first_kept) == (1000.0, 0.0)
    assert second.tbt_max_ms == pytest.approx(50.0)
    assert second_kept == 1.0


def test_a_phase_without_an_answer_measures_nothing() -> None:
    phases = parse_phases("64x8@1,512x8@1", 10.0)
    with pytest.raises(MeasurementError):
        phase_figures([trace(1.0, 1.5)], phases, tbt_ms=100)
