"""A start's times, read from what a server prints; `legato serve` itself is started elsewhere."""

from __future__ import annotations

import pytest

from app.bench.report import MeasurementError
from app.bench.startup import parts_of
from app.cli.banner import ready_in


def test_the_times_are_those_that_a_server_prints() -> None:
    line = f"Legato serves demo at http://127.0.0.1:8000  ({ready_in([0.5, 2.0, 3.0, 6.26])})\n"
    assert parts_of(line) == {
        "imports": 0.5, "Ray": 1.5, "Serve": 1.0, "model": 3.3, "in all": 6.3,
    }  # fmt: skip


def test_a_server_that_prints_no_times_is_an_error() -> None:
    with pytest.raises(MeasurementError, match="no times"):
        parts_of("Legato serves demo")
