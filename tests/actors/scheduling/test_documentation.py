"""What the documentation shows is executed."""

from __future__ import annotations

import doctest
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import actors.scheduling
from actors.scheduling.admission import ADMISSIONS
from actors.scheduling.budgets import BUDGETS
from actors.scheduling.config import SchedulerConfig
from actors.scheduling.policies import POLICIES
from actors.scheduling.queue import ORDERS
from actors.scheduling.request import Request, SamplingParams
from tests.actors.scheduling.driver import Driver

ROOM = Path(actors.scheduling.__file__).parent


@pytest.mark.parametrize("module", ["state", "policies.sarathi"])
def test_doctests(module: str) -> None:
    result = doctest.testmod(import_module(f"actors.scheduling.{module}"))
    assert result.attempted > 0
    assert result.failed == 0


def test_the_readme_example_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOM / "README.md").read_text(), re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})


def test_the_policy_of_contributing_plans_as_the_one_that_it_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = (ROOM.parents[1] / "CONTRIBUTING.md").read_text()
    (example,) = re.findall(r"```py\n(.*?class WholePrompts.*?)```", text, re.DOTALL)
    namespace: dict[str, Any] = {"__name__": "example"}
    exec(compile(example, "CONTRIBUTING.md", "exec"), namespace)
    monkeypatch.setitem(POLICIES, "whole_prompts", namespace["WholePrompts"])
    planned = []
    for policy in ("whole_prompts", "hybrid_only"):
        driver = Driver(SchedulerConfig(policy=policy, num_blocks=64, max_requests=4))
        for number, length in enumerate((40, 7, 100, 3, 25)):
            driver.submit(Request(number, (1,) * length, SamplingParams(3 + number), 0.0))
        driver.drain()
        planned.append([plan.slices for plan in driver.plans])
    assert planned[0] == planned[1]
    assert any(len(slices) > 1 for slices in planned[0])


def test_the_readme_has_a_row_for_every_part() -> None:
    readme = (ROOM / "README.md").read_text()
    for name in (*POLICIES, *ORDERS, *BUDGETS, *ADMISSIONS):
        assert f"| `{name}` |" in readme, name


def test_the_readme_names_every_file_and_no_other() -> None:
    readme = (ROOM / "README.md").read_text()
    named = set(re.findall(r"`((?:\w+/)?\w+\.py)`", readme))
    files = {path.relative_to(ROOM).as_posix() for path in ROOM.rglob("*.py")}
    assert named == {name for name in files if not name.endswith("__init__.py")}
