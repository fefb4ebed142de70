"""What the documentation shows is executed, and names what there is."""

from __future__ import annotations

import doctest
import re
from importlib import import_module
from pathlib import Path

import pytest

import actors.fleet
from actors.fleet.roles import WAYS
from actors.fleet.routers import ROUTERS
from actors.fleet.scaling import SCALINGS

ROOM = Path(actors.fleet.__file__).parent


@pytest.mark.parametrize("module", ["snapshot", "prefixes"])
def test_doctests(module: str) -> None:
    result = doctest.testmod(import_module(f"actors.fleet.{module}"))
    assert result.attempted > 0
    assert result.failed == 0


def test_the_readme_has_a_row_for_every_part_and_file() -> None:
    readme = (ROOM / "README.md").read_text()
    for name in (*ROUTERS, *SCALINGS, *WAYS):
        assert f"| `{name}` |" in readme, name
    named = set(re.findall(r"^\| `(\w+\.py|\w+/)` \|", readme, re.MULTILINE))
    here = {path.name for path in ROOM.glob("*.py")} - {"__init__.py"}
    assert named == here | {"routers/", "scaling/"}
