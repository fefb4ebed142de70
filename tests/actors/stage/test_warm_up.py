"""Imports ahead of their use, of a standby on idle cores."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from pathlib import Path

import pytest

import actors.stage.warm_up as module
from actors.stage.warm_up import import_all

MODULE = """
import os, threading
where = threading.get_native_id()
policy = os.sched_getscheduler(where)
"""
NAMES = ("warm_up_needed_to_load", "warm_up_needed_by_grammars", "warm_up_broken")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Modules in place of those that take seconds."""
    for name in NAMES[:2]:
        (tmp_path / f"{name}.py").write_text(MODULE)
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / f"{NAMES[2]}.py").write_text("raise OSError('Too many open files')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(module, "_NEEDED_TO_LOAD", NAMES[:1])
    monkeypatch.setattr(module, "_NEEDED_BY_GRAMMARS", NAMES[1:2])
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_imports_take_only_idle_cores_and_their_caller_does_not() -> None:
    before = os.sched_getscheduler(0)
    import_all(with_grammars=False, when_idle=True)
    found = sys.modules[NAMES[0]]
    assert found.where != threading.get_native_id()
    assert found.policy == os.SCHED_IDLE
    assert os.sched_getscheduler(0) == before


@pytest.mark.usefixtures("folder")
def test_the_first_stages_do_not_wait_for_idle_cores() -> None:
    import_all(with_grammars=False, when_idle=False)
    assert sys.modules[NAMES[0]].policy != os.SCHED_IDLE


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("with_grammars", [False, True])
def test_the_grammar_compiler_is_imported_where_it_is_used(with_grammars: bool) -> None:
    import_all(with_grammars, when_idle=True)
    assert [name in sys.modules for name in NAMES] == [True, with_grammars, False]


@pytest.mark.usefixtures("folder")
def test_what_cannot_be_imported_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The standby is then not ready, and another one is made."""
    monkeypatch.setattr(module, "_NEEDED_TO_LOAD", NAMES[2:])
    with pytest.raises(OSError, match="Too many open files"):
        import_all(with_grammars=False, when_idle=True)


@pytest.mark.parametrize("name", [*module._NEEDED_TO_LOAD, *module._NEEDED_BY_GRAMMARS])
def test_the_modules_exist(name: str) -> None:
    package, *rest = name.split(".")
    found = importlib.util.find_spec(package)
    assert found is not None
    assert found.submodule_search_locations is not None
    path = Path(found.submodule_search_locations[0]).joinpath(*rest)
    assert path.is_dir() or path.with_suffix(".py").exists()
