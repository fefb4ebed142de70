"""What the banner says; the whole of it is read in tests of `legato serve`."""

from __future__ import annotations

from app.cli.banner import ready_in


def test_the_parts_are_the_time_from_one_end_to_the_next() -> None:
    said = ready_in([3.0, 6.2, 13.1, 28.9])
    assert said == "ready in 28.9 s: imports 3.0, Ray 3.2, Serve 6.9, model 15.8"
