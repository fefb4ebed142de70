"""Builds the CPU library: one shared object with a C interface, loaded by ctypes.

It needs a C++17 compiler that knows AMX (GCC 11, Clang 12) and nothing else (no torch or Python
headers), and is optional: where it cannot be built, installation goes on and the plain-torch
backend serves instead.

LEGATO_LIBRARY=native builds it for AVX2 and the best instruction set of this processor, in a
quarter to two thirds of the time. LEGATO_LIBRARY=apart builds none: `make` does, while packages are
fetched.
"""

import hashlib
import os
import platform
import re
import runpy
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCE = Path("kernels/cpu/src")
# g++ 12 takes the undefined-on-purpose registers of its own intrinsics for uninitialized ones.
WARNINGS = ["-Wall", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
BASELINE = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    # Multiply-adds are written where they are meant: a * b + c must round alike everywhere.
    "-ffp-contract=off",
    *WARNINGS,
]
ISAS = {
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"],
    "avx512_bf16": [
        *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"),
        *("-mavx512bf16", "-mavx512vnni"),
    ],
}
# Of sources that are compiled once, by how their names end.
SINGLE = {
    "vnni": [*ISAS["avx512"], "-mavx512vnni"],
    "amx": [*ISAS["avx512_bf16"], "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
}
# What a processor uses besides AVX2, by the flags that Linux names; the first that it has all of.
AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
AMX = {"amx_tile", "amx_bf16", "amx_int8"}
NATIVE = [
    (AVX512 | {"avx512_vnni", "avx512_bf16", *AMX}, ["avx512_bf16", "amx"]),
    (AVX512 | {"avx512_vnni", "avx512_bf16"}, ["avx512_bf16"]),
    (AVX512 | {"avx512_vnni"}, ["avx512", "vnni"]),
    (AVX512, ["avx512"]),
    (set(), []),
]


def native_sets(cpuinfo: str) -> list[str]:
    """Those that the processor of which Linux tells this uses."""
    found = re.search(r"^flags\s*:(.*)", cpuinfo, re.MULTILINE)
    flags = set(found[1].split()) if found else set()
    return ["avx2", *next(sets for needs, sets in NATIVE if needs <= flags)]


LIBRARY = os.environ.get("LEGATO_LIBRARY", "")
if LIBRARY not in ("", "native", "apart"):
    raise SystemExit(f"LEGATO_LIBRARY={LIBRARY}: it is native, apart or not set")


def wanted_sets() -> list[str]:
    """The instruction sets to build for."""
    if LIBRARY == "native":
        return native_sets(Path("/proc/cpuinfo").read_text())
    return [*ISAS, *SINGLE]


def sets_in(library: Path, sources: str) -> set[str]:
    """Those that it was built for; none if it was built from other sources than those."""
    found = re.search(rf"{sources}((?: \w+)+)".encode(), library.read_bytes())
    return set(found[1].decode().split()) if found else set()


def is_per_isa(source: str) -> bool:
    """Whether a source is compiled once per instruction set."""
    return source.endswith("_isa.cpp")


def single_isa(source: str) -> str | None:
    """The one instruction set that a source is compiled for, if there is one."""
    return next((isa for isa in SINGLE if source.endswith(f"_{isa}.cpp")), None)


class BuildLibrary(build_ext):
    """Compiles *_isa.cpp once per instruction set, everything else once, two at a time."""

    def get_ext_filename(self, fullname: str) -> str:
        """No Python ABI tag: the library knows nothing of Python."""
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def get_export_symbols(self, ext: Extension) -> list[str]:
        """What extern "C" marks as visible, and no module initializer."""
        return []

    def build_extension(self, ext: Extension) -> None:
        built = Path(self.get_ext_filename(ext.name))  # in place, by `make build`
        target = Path(self.get_ext_fullpath(ext.name))
        sources = runpy.run_path("kernels/cpu/source_hash.py")["source_hash"](SOURCE)
        sets = wanted_sets()
        is_fresh = (
            built.exists()
            and set(sets) <= sets_in(built, sources)
            and built.stat().st_mtime >= os.path.getmtime(__file__)  # which holds the flags
        )
        if self.force or not is_fresh:
            self.compile_and_link(ext, sources, sets)
        elif built.resolve() != target.resolve():
            self.mkpath(str(target.parent))
            self.copy_file(str(built), str(target))

    def compile_and_link(self, ext: Extension, sources: str, sets: list[str]) -> None:
        """sources: their hash, for the library to tell."""
        # Inline functions that several objects share are taken from the first object linked. The
        # order below (baseline first, then ever wider) keeps wide instructions out of shared code.
        once = [s for s in ext.sources if not is_per_isa(s) and not single_isa(s)]
        has = [f"-DLEGATO_HAS_{isa}={int(isa in sets)}" for isa in (*ISAS, *SINGLE)]
        jobs = [(source, "baseline", has) for source in once]
        jobs += [
            (source, isa, [*flags, f"-DLEGATO_ISA={isa}"])
            for isa, flags in ISAS.items()
            for source in filter(is_per_isa, ext.sources)
            if isa in sets
        ]
        jobs += [
            (source, isa, [*flags, f"-DLEGATO_ISA={isa}"])
            for isa, flags in SINGLE.items()
            for source in ext.sources
            if single_isa(source) == isa and isa in sets
        ]
        headers = b"".join(Path(header).read_bytes() for header in ext.depends)

        def compile_one(job: tuple[str, str, list[str]]) -> str:
            """By content, as a file's time may lie: an object lies in a folder named by all that
            it is made of."""
            source, variant, flags = job
            if Path(source).stem == "source_hash":
                flags = [*flags, f'-DLEGATO_BUILT="{sources} {" ".join(sets)}"']
            content = Path(source).read_bytes() + headers + repr([*BASELINE, *flags]).encode()
            of_source = Path(self.build_temp) / variant / Path(source).stem
            folder = of_source / hashlib.sha256(content).hexdigest()[:16]
            target = folder / Path(source).with_suffix(".o")
            if not self.force and target.exists():
                return str(target)
            shutil.rmtree(of_source, ignore_errors=True)
            (made,) = self.compiler.compile(
                [source], output_dir=str(folder), extra_postargs=[*BASELINE, *flags]
            )
            return str(made)

        with ThreadPoolExecutor(max_workers=min(2, os.cpu_count() or 1)) as workers:
            objects = list(workers.map(compile_one, jobs))
        self.compiler.link_shared_object(
            objects,
            self.get_ext_fullpath(ext.name),
            libraries=["pthread"],
            target_lang="c++",
            build_temp=self.build_temp,
        )


class PlatformWheel(bdist_wheel):
    """The wheel is for a platform, and for every Python: the library knows nothing of it."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform_tag = super().get_tag()
        return "py3", "none", platform_tag


def extensions() -> list[Extension]:
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "AMD64"):
        return []
    if LIBRARY == "apart":  # `make` builds it while packages are fetched
        return []
    return [
        Extension(
            "kernels.cpu.liblegato",
            sources=sorted(str(path) for path in SOURCE.glob("*.cpp")),
            depends=sorted(str(path) for path in SOURCE.glob("*.h")),
            language="c++",
            optional=True,
        )
    ]


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel})
