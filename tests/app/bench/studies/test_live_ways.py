"""The loads under which ways are compared."""

from __future__ import annotations

import pytest
import typer

from app.bench.studies.live_ways import ENGINES, LOADS, WAYS, NamedLoad


def test_loads_are_named() -> None:
    assert len({NamedLoad.parse(text, 20.0, 0).name for text in LOADS.split(",")}) >= 4
    named = NamedLoad.parse("chat=128x64@2.5", 20.0, 3)
    assert (named.name, named.load.lengths, named.load.qps, named.load.seed) == (
        "chat", "128x64", 2.5, 3,
    )  # fmt: skip
    assert named.warm_up.jobs() != named.load.jobs()
    with pytest.raises(typer.BadParameter, match="NAME=LENGTHS@QPS"):
        NamedLoad.parse("chat=128x64", 20.0, 0)


def test_every_way_has_two_of_the_engines() -> None:
    assert {len(names) for names in WAYS.values()} == {2}
    assert {name for names in WAYS.values() for name in names} == set(ENGINES)
