"""A library that was built for one processor: for which sets, and what it uses on another one."""

from __future__ import annotations

import ctypes
import logging
import os
import runpy
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kernels.cpu import library
from kernels.cpu.library import Isa
from kernels.cpu.source_hash import SOURCES

pytestmark = pytest.mark.skipif(library.load() is None, reason="the C++ library was not built")

ROOT = Path(__file__).resolve().parents[3]
SETS = ("avx512", "vnni", "avx512_bf16", "amx")


@pytest.fixture(name="setup")
def _setup(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What setup.py defines."""
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    monkeypatch.chdir(ROOT)
    return runpy.run_path("setup.py")


@pytest.mark.parametrize(
    ("flags", "sets"),
    [
        ("fma avx2", []),
        ("avx2 avx512f avx512vl", []),
        ("avx512f avx512bw avx512dq avx512vl", ["avx512"]),
        ("avx512f avx512bw avx512dq avx512vl avx512_vnni", ["avx512", "vnni"]),
        ("avx512f avx512bw avx512dq avx512vl avx512_vnni avx512_bf16", ["avx512_bf16"]),
        (
            "avx512f avx512bw avx512dq avx512vl avx512_vnni avx512_bf16 amx_tile amx_bf16 amx_int8",
            ["avx512_bf16", "amx"],
        ),
    ],
)
def test_it_is_built_for_avx2_and_what_the_processor_uses(
    setup: dict[str, Any], flags: str, sets: list[str]
) -> None:
    cpuinfo = f"processor\t: 0\nflags\t\t: fpu {flags}\nbugs\t\t: none\n"
    assert setup["native_sets"](cpuinfo) == ["avx2", *sets]
    assert setup["native_sets"]("no such line") == ["avx2"]


def test_it_tells_for_which_sets_of_which_sources(setup: dict[str, Any], tmp_path: Path) -> None:
    built = tmp_path / "liblegato.so"
    built.write_bytes(b"\0\1legato\0" + b"ab12" + b" avx2 amx\0avx512\0")
    assert setup["sets_in"](built, "ab12") == {"avx2", "amx"}
    assert setup["sets_in"](built, "cd34") == set()


@pytest.mark.parametrize("built", [(), ("avx512",), ("avx512_bf16",), SETS])
def test_it_uses_the_best_set_that_it_has(tmp_path: Path, built: tuple[str, ...]) -> None:
    target = tmp_path / "isa.so"
    has = [f"-DLEGATO_HAS_{name}={int(name in built)}" for name in SETS]
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    command = [*compiler, "-std=c++17", "-shared", "-fPIC", *has, str(SOURCES / "isa.cpp")]
    subprocess.run([*command, "-o", str(target)], check=True)
    part = ctypes.CDLL(str(target))
    names = ("avx2", "avx512", "vnni", "avx512_bf16", "amx")  # by number
    best = part.legato_machine_isa()
    for asked in range(len(names)):
        usable = [n for n in range(min(asked, best) + 1) if names[n] in ("avx2", *built)]
        assert part.legato_set_isa(asked) == max(usable)


def test_on_a_better_processor_it_says_how_to_build_it_anew(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("LEGATO_CPU_ISA", raising=False)
    before = library.isa()
    if before == Isa.AVX2:
        pytest.skip("this processor has no better set")
    library.set_isa(Isa.AVX2)
    try:
        with caplog.at_level(logging.WARNING):
            library.load.__wrapped__()
    finally:
        library.set_isa(before)
    assert f"no {before.name.lower()} and uses avx2 instead: `make build`" in caplog.text
