"""The house stands only while imports point down: app -> actors -> kernels."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLOORS = {"app": 2, "actors": 1, "kernels": 0}
HEAVY = {"ray", "torch", "transformers", "triton", "flash_attn"}

# Room -> top-level packages it must not import (a room covers its sub-rooms).
FORBIDDEN = {
    "actors/scheduling": HEAVY | {"numpy", "pyarrow", "pydantic", "msgpack", "random", "time"},
    "app/simulate": HEAVY,
    "app/api": HEAVY,
    "kernels": {"ray", "transformers"},
    "app/text": {"ray", "torch"},
    "app/telemetry": HEAVY,
}


def modules(room: str = "") -> Iterator[Path]:
    for floor in FLOORS:
        for path in sorted((ROOT / floor).rglob("*.py")):
            if path.relative_to(ROOT).as_posix().startswith(f"{room}/" if room else ""):
                yield path


def imports(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module


def test_imports_point_down() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in modules()
        for line, name in imports(path)
        if FLOORS.get(name.split(".")[0], -1) > FLOORS[path.relative_to(ROOT).parts[0]]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", sorted(FORBIDDEN))
def test_rooms_stay_light(room: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in modules(room)
        for line, name in imports(path)
        if name.split(".")[0] in FORBIDDEN[room]
    ]
    assert not wrong, "\n".join(wrong)


def test_only_the_actor_file_of_a_stage_knows_ray() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in modules("actors/stage")
        for line, name in imports(path)
        if name.split(".")[0] == "ray" and path.name != "actor.py"
    ]
    assert not wrong, "\n".join(wrong)


def test_compiled_graphs_live_in_one_file() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in modules()
        for line, name in imports(path)
        if name.startswith("ray.dag")
        and path.relative_to(ROOT).as_posix() != "actors/transport/graph_pipeline.py"
    ]
    assert not wrong, "\n".join(wrong)


def test_rooms_do_not_import_in_circles() -> None:
    """Between the modules of one floor: no cycle of module-level imports."""
    graph: dict[str, set[str]] = {}
    known = {p.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): p for p in modules()}
    for name, path in known.items():
        tree = ast.parse(path.read_text())
        targets: set[str] = set()
        for node in tree.body:
            if isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                targets.add(node.module)
                targets |= {f"{node.module}.{alias.name}" for alias in node.names}
        graph[name] = {t for t in targets if t in known and t != name}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail[trail.index(name) :], name))
        if name not in done:
            for target in graph[name]:
                visit(target, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())
