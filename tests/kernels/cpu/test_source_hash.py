"""Which library is refused: one older than its sources, by content alone; a set that is none."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kernels.cpu import library
from kernels.cpu.source_hash import SOURCES, source_hash

pytestmark = pytest.mark.skipif(library.load() is None, reason="the C++ library was not built")


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the sources, newer than the library, which is held against it."""
    folder = tmp_path / "src"
    shutil.copytree(SOURCES, folder, copy_function=shutil.copyfile)
    monkeypatch.setattr(library, "source_hash", lambda: source_hash(folder))
    return folder


def test_sources_that_are_only_newer_fit(sources: Path) -> None:
    assert library.load.__wrapped__() is not None


def test_a_wheel_has_no_sources(sources: Path) -> None:
    shutil.rmtree(sources)
    assert library.load.__wrapped__() is not None


@pytest.mark.parametrize("change", ["content", "name", "removal"])
def test_other_sources_are_refused(sources: Path, change: str) -> None:
    header = sources / "vec.h"
    if change == "content":
        header.write_text(header.read_text() + "\n")
    elif change == "name":
        header.rename(sources / "vectors.h")
    else:
        header.unlink()
    with pytest.raises(library.StaleLibrary, match="make build"):
        library.load.__wrapped__()


def test_a_library_that_cannot_tell_is_refused(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those built before it could."""
    old = tmp_path / "liblegato.so"
    old.write_bytes(library._PATH.read_bytes().replace(b"legato_built", b"legato_guilt"))
    monkeypatch.setattr(library, "_PATH", old)
    with pytest.raises(library.StaleLibrary, match="make build"):
        library.load.__wrapped__()


@pytest.mark.parametrize("name", ["bogus", "AVX2"])
def test_an_instruction_set_that_does_not_exist_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Not taken for the best one."""
    monkeypatch.setenv("LEGATO_CPU_ISA", name)
    with pytest.raises(ValueError, match=f"LEGATO_CPU_ISA={name}: there is no such set; known: av"):
        library.load.__wrapped__()
