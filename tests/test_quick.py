"""`pytest --quick` runs what needs neither Ray nor tensor work, and all of that."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.quick import ROOT, SLOW, is_quick, quick_modules

IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    assert "ray" not in sys.modules, f"{name} imports ray"
"""


@pytest.mark.heavy
@pytest.mark.long
def test_its_modules_load_without_ray() -> None:
    """What imports say without being run is what happens when they are. `make quick` itself ends
    with an error where one of them loads Ray."""
    names = [
        p.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for p in quick_modules()
    ]
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *names], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_rooms_that_promise_neither_are_in_it() -> None:
    """The rooms of the code that `test_layers` keeps free of Ray have their tests in it."""
    rooms = ("actors/fleet", "actors/scheduling", "app/api", "app/telemetry", "app/text")
    left_out = [
        p for room in rooms for p in (ROOT / "tests" / room).rglob("test_*.py") if not is_quick(p)
    ]
    assert not left_out


@pytest.mark.parametrize(
    ("text", "quick"),
    [
        ("import json\n", True),
        ("import ray\n", False),
        ("from actors.engine.scheduler import SchedulerActor\n", False),  # imports Ray in its turn
        ("from actors.scheduling.core import Core\n", True),
        ("import torch\n", False),
        ("from tests import tiny_models\n", False),  # a helper that imports torch
        ("def test_lazily():\n    import ray\n", True),  # the run itself finds this one
    ],
)
def test_imports_decide(tmp_path: Path, text: str, quick: bool) -> None:
    module = tmp_path / "test_it.py"
    module.write_text(text)
    assert is_quick(module) == quick


def test_a_test_that_starts_ray_is_marked(request: pytest.FixtureRequest) -> None:
    """Whatever this run collected: a test with a cluster is left out of `--quick`."""
    unmarked = [
        item.nodeid
        for item in request.session.items
        if "ray_cluster" in getattr(item, "fixturenames", ())
        and not any(item.get_closest_marker(name) for name in SLOW)
    ]
    assert not unmarked
