"""Which test modules `pytest --quick` runs: those without Ray and without tensor work.

Read from imports, never from a list: a module is left out when it reaches Ray through anything it
imports, or when it, or a helper of the tests that it imports, imports torch itself. A test whose
imports do not tell, because it starts processes of its own, carries one of the markers in `SLOW`;
one that takes many seconds by itself is marked `heavy`.
"""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FLOORS = ("app", "actors", "kernels", "tests")
PROCESSES = ("ray", "serve", "browser")
SLOW = (*PROCESSES, "gpu", "tensors")
LEFT_OUT = (*SLOW, "heavy")


def is_quick(path: Path) -> bool:
    """Whether `pytest --quick` collects this test module."""
    modules = [path, *(c for p in path.parents if (c := p / "conftest.py").exists())]
    return not any(_reaches(m, "ray", FLOORS) or _reaches(m, "torch", ("tests",)) for m in modules)


def quick_modules() -> list[Path]:
    return [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if is_quick(path)]


def _reaches(path: Path, package: str, through: tuple[str, ...]) -> bool:
    """Whether importing this file imports the package, by way of modules on these floors."""
    leading = _leading_to(package, through)
    return _names(path, package) or any(file in leading for file in _imported_files(path, through))


@functools.cache
def _leading_to(package: str, through: tuple[str, ...]) -> set[Path]:
    """The files on these floors whose import imports the package."""
    importers = defaultdict[Path, list[Path]](list)
    found, left = set[Path](), list[Path]()
    for path in (path for floor in through for path in (ROOT / floor).rglob("*.py")):
        for file in _imported_files(path, through):
            importers[file].append(path)
        if _names(path, package):
            left.append(path)
    while left:
        if (path := left.pop()) not in found:
            found.add(path)
            left += importers[path]
    return found


def _names(path: Path, package: str) -> bool:
    return any(name.split(".")[0] == package for name in _imports(path))


def _imported_files(path: Path, through: tuple[str, ...]) -> Iterator[Path]:
    for name in _imports(path):
        if name.split(".")[0] in through:
            yield from _files(name)


@functools.cache
def _imports(path: Path) -> frozenset[str]:
    return frozenset(_imported(ast.parse(path.read_text()).body))


def _imported(body: list[ast.stmt]) -> Iterator[str]:
    """Modules that these statements import when the file is loaded: not those inside functions."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _imported(node.orelse)
        elif isinstance(node, ast.If | ast.Try | ast.With):
            for field in ("body", "orelse", "finalbody"):
                yield from _imported(getattr(node, field, []))
            for handler in getattr(node, "handlers", []):
                yield from _imported(handler.body)


@functools.cache
def _files(name: str) -> list[Path]:
    """The files that `import name` runs: the module and the packages around it."""
    parts = name.split(".")
    stems = [ROOT.joinpath(*parts[:length]) for length in range(1, len(parts) + 1)]
    files = [file for stem in stems for file in (stem / "__init__.py", stem.with_suffix(".py"))]
    return [file for file in files if file.exists()]
