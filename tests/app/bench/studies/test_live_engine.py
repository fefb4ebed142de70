"""Which configs an engine of a study can be started from."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
import yaml

from app.bench.studies.live_engine import read_args


@pytest.mark.parametrize(
    "args", [{"slo": {"tbt_ms": 50}}, {"slo": "strict"}, {"scheduling": {"cost_model": "x.json"}}]
)
def test_an_engine_with_an_objective_measures_its_own_cost_model(
    tmp_path: Path, args: dict[str, object]
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"applications": [{"args": args}]}))
    assert read_args(file, needs_cost_model=True) == args


def test_without_either_there_is_none(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"applications": [{"args": {"scheduling": {}}}]}))
    assert read_args(file) == {"scheduling": {}}
    with pytest.raises(typer.BadParameter, match=r"neither slo\.tbt_ms nor scheduling\.cost_model"):
        read_args(file, needs_cost_model=True)


def test_a_file_that_is_no_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match=r"missing\.yaml"):
        read_args(tmp_path / "missing.yaml")
