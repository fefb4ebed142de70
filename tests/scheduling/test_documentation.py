"""What the documentation shows is executed."""

from __future__ import annotations

import doctest
import re
from importlib import import_module
from pathlib import Path

import pytest

import actors.scheduling
from actors.scheduling.policies import POLICIES
from actors.scheduling.queue import ORDERS

ROOM = Path(actors.scheduling.__file__).parent


@pytest.mark.parametrize("module", ["prefix", "policies.sarathi"])
def test_doctests(module: str) -> None:
    result = doctest.testmod(import_module(f"actors.scheduling.{module}"))
    assert result.attempted > 0
    assert result.failed == 0


def test_the_readme_example_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOM / "README.md").read_text(), re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})


def test_the_readme_names_every_policy_and_file() -> None:
    readme = (ROOM / "README.md").read_text()
    for policy in POLICIES:
        assert f"| `{policy}` |" in readme
    for order in ORDERS:
        assert f"`{order}`" in readme
    for name in re.findall(r"`(\w+\.py)`", readme):
        assert (ROOM / name).exists(), name
