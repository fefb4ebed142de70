"""Imports point down only: what each room (a group of modules) may import."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLOORS = ("kernels", "actors", "app")  # from the ground up

# Room: (its modules, the rooms it may import beside itself). Read from the ground up.
ROOMS: dict[str, tuple[str, str]] = {
    "kernels": ("kernels/*.py", ""),
    "kernels.backends": ("kernels/*/*.py", "kernels"),
    # the pure core
    "vocabulary": (
        "actors/scheduling/{config,setting,live_changes,request,plan,events,state,interfaces,"
        "registry}.py",
        "",
    ),
    "cost": ("actors/scheduling/cost/*.py", "vocabulary"),
    "queue": ("actors/scheduling/queue/*.py", "vocabulary cost"),
    "memory": ("actors/scheduling/memory/*.py", "vocabulary"),
    "budgets": ("actors/scheduling/budgets/*.py", "vocabulary cost"),
    "admission": ("actors/scheduling/admission/*.py", "vocabulary cost"),
    "step": (
        "actors/scheduling/{class_view,early_fetch,lifecycle,microbatch,readable_step,save_queue,second_tier,step,step_contents,tier_contents}.py",
        "vocabulary queue memory",
    ),
    "policies": ("actors/scheduling/policies/*.py", "vocabulary step"),
    "speculation": ("actors/scheduling/speculation/*.py", "vocabulary step"),
    "core": (
        "actors/scheduling/{core,queue_timeout,outcomes,faults,statistics,build,event_log,validation}.py",
        "vocabulary queue cost budgets admission step policies speculation",
    ),
    # the fleet's decisions
    "fleet.picture": (
        "actors/fleet/{snapshot,prefixes,fleet,publish}.py",
        "vocabulary cost admission core",
    ),
    "fleet.routers": ("actors/fleet/routers/*.py", "vocabulary fleet.picture"),
    "fleet": (
        "actors/fleet/{moves,balance,roles,way_router,scaling/*}.py",
        "vocabulary fleet.picture fleet.routers",
    ),
    # the running engine
    "transport": ("actors/transport/*.py", "kernels vocabulary fleet.picture"),
    "stage.spec": ("actors/stage/spec.py", ""),
    "stage.tier": ("actors/stage/tier/*.py", ""),
    "stage.model": (
        "actors/stage/{models,weights}/*.py",
        "kernels transport stage.spec",
    ),
    "stage": (
        "actors/stage/{*,cuda/*,grammars/*}.py",
        "kernels vocabulary transport stage.spec stage.model stage.tier",
    ),
    "engine.config": ("actors/engine/config.py", "vocabulary stage.spec"),
    "calibration": (
        "actors/calibration/*.py",
        "vocabulary cost transport stage.spec engine.config",
    ),
    "executor": (
        "actors/executor/*.py",
        "vocabulary fleet.picture transport stage stage.spec engine.config calibration",
    ),
    "engine": (
        "actors/engine/*.py",
        "vocabulary core fleet.picture transport stage.spec engine.config calibration executor",
    ),
    # the interfaces: HTTP, Python, command line
    "installation": ("app/{paths,ray_environment,terminal}.py", ""),
    "client": ("app/engine_client/client.py", "vocabulary"),
    "app.engine_client": (
        "app/engine_client/*.py",
        "vocabulary cost fleet.picture engine.config executor engine transport stage.spec client",
    ),
    "app.fleet": (
        "app/fleet/*.py",
        "vocabulary fleet.picture fleet.routers fleet engine transport client app.engine_client",
    ),
    "output": ("app/text/output/*.py", "vocabulary"),
    "text": ("app/text/*.py", "vocabulary stage client output installation"),
    "http": ("app/api/http/*.py", "client"),
    "schema": ("app/api/schema/*.py", ""),
    "batches": ("app/api/batches/*.py", "http"),
    "api": (
        "app/api/{context,events,generation,sampling_params,sse}.py",
        "vocabulary client text http schema",
    ),
    "endpoints": (
        "app/api/{application,endpoints/*}.py",
        "installation vocabulary client output text http schema batches api",
    ),
    "telemetry": ("app/telemetry/*.py", "vocabulary transport api"),
    "console": ("app/console/*.py", "policies client http"),
    "settings": (
        "app/settings/*.py",
        "vocabulary core fleet.picture fleet.routers fleet engine.config calibration stage"
        " stage.spec stage.model http schema installation",
    ),
    "simulate.inputs": (
        "app/simulate/{hardware,workload}/*.py",
        "vocabulary cost core calibration installation",
    ),
    "simulate.run": (
        "app/simulate/run/*.py",
        "vocabulary cost speculation core fleet.picture fleet.routers fleet simulate.inputs",
    ),
    "simulate": (
        "app/simulate/{*,paper/*,studies/*}.py",
        "vocabulary cost core policies calibration installation fleet.routers fleet"
        " simulate.inputs simulate.run",
    ),
    "bench": (
        "app/bench/**.py",
        "kernels kernels.backends vocabulary cost core policies calibration engine stage stage.spec"
        " stage.model"
        " transport app.engine_client client telemetry settings installation simulate.inputs"
        " simulate.run simulate fleet fleet.picture fleet.routers app.fleet",
    ),
    "composition": (
        "app/{main,server,fleet_server,replica,batch_service,handle_calls,handle_params,user_config}"
        ".py",
        "vocabulary calibration batches fleet.routers fleet engine.config executor engine transport"
        " app.engine_client app.fleet text api schema endpoints http telemetry console settings"
        " client installation",
    ),
    "cli": (
        "app/cli/*.py",
        "core calibration engine.config executor engine transport stage settings installation"
        " telemetry bench simulate simulate.inputs simulate.run text http batches",
    ),
}

# Folder -> packages it must not import.
HEAVY = {"ray", "torch", "transformers", "triton", "flash_attn", "flash_attn_interface"}
INPUT_OUTPUT = {
    "asyncio", "datetime", "io", "logging", "os", "pathlib", "random", "secrets", "socket",
    "subprocess", "sys", "tempfile", "threading", "time", "uuid",
}  # fmt: skip
FORBIDDEN = {
    "actors/scheduling": HEAVY | INPUT_OUTPUT | {"numpy", "pyarrow", "pydantic", "msgpack"},
    "actors/fleet": HEAVY | INPUT_OUTPUT | {"numpy", "pyarrow", "pydantic", "msgpack"},
    "app/simulate": HEAVY,
    "app/api": HEAVY,
    "kernels": {"ray", "transformers"},
    "app/text": {"ray", "torch"},
    "app/telemetry": HEAVY,
}

PARTS_OF_TESTS = {"live"}  # folders of tests that are none of the code
# How many modules of a folder have no test of their own name, at most: a new one has its test, and
# a number that has become too high is lowered.
MOST_WITHOUT_TEST = {
    "actors/engine": 1,
    "actors/executor": 0,
    "actors/fleet": 9,
    "actors/scheduling": 15,
    "actors/stage": 39,
    "actors/transport": 5,
    "app/api": 34,
    "app/engine_client": 1,
    "app/fleet": 7,
    "app/settings": 2,
    "app/telemetry": 2,
    "app/text": 17,
}
CHECKS = "app.bench.gpu"  # of kernels against float64, which run on GPUs that no test has


def modules(folder: str = "") -> Iterator[Path]:
    """Paths from the root, below a folder."""
    for floor in FLOORS:
        for path in sorted((ROOT / floor).rglob("*.py")):
            relative = path.relative_to(ROOT)
            if relative.as_posix().startswith(f"{folder}/" if folder else ""):
                yield relative


@cache
def imports(path: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of everything imported, also within functions."""
    found = list[tuple[int, str]]()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            found += ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found += ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
    return found


@cache
def module_of(name: str) -> Path | None:
    """The file of ours that a dotted name means, if any."""
    parts = name.split(".")
    while parts and parts[0] in FLOORS:
        path = Path(*parts)
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if (ROOT / candidate).exists():
                return candidate
        parts.pop()
    return None


def expand(pattern: str) -> list[str]:
    """A pattern with one {a,b} group as plain patterns."""
    head, brace, rest = pattern.partition("{")
    if not brace:
        return [pattern]
    group, _, tail = rest.partition("}")
    return [f"{head}{choice}{tail}" for choice in group.split(",")]


def room_of(path: Path) -> str | None:
    """The first room whose pattern fits; `*` stays within a folder, `**` does not."""
    name = path.as_posix()
    for room, (pattern, _) in ROOMS.items():
        for plain in expand(pattern):
            if fnmatchcase(name, plain) and ("**" in plain or name.count("/") == plain.count("/")):
                return room
    return None


def test_every_module_has_a_room() -> None:
    without_room = [
        str(path) for path in modules() if room_of(path) is None and (ROOT / path).stat().st_size
    ]
    assert not without_room, "\n".join(without_room)


@pytest.mark.heavy
def test_rooms_import_only_what_the_table_says() -> None:
    wrong = [
        f"{path}:{line} ({room}) imports {name} ({target})"
        for path in modules()
        if (room := room_of(path)) is not None
        for line, name in imports(path)
        if (module := module_of(name)) is not None
        and (target := room_of(module)) is not None
        and target not in {room, *ROOMS[room][1].split()}
    ]
    assert not wrong, "\n".join(wrong)


def test_rooms_stand_in_order() -> None:
    """A room is listed above those that import it, so that no two rooms import each other."""
    names = list(ROOMS)
    wrong = [
        f"{room} before {other}"
        for room, (_, may_import) in ROOMS.items()
        for other in may_import.split()
        if names.index(other) > names.index(room)
    ]
    assert not wrong, "\n".join(wrong)


def test_imports_point_down() -> None:
    wrong = [
        f"{path}:{line} imports {name}"
        for path in modules()
        for line, name in imports(path)
        if name.split(".")[0] in FLOORS
        and FLOORS.index(name.split(".")[0]) > FLOORS.index(path.parts[0])
    ]
    assert not wrong, "\n".join(wrong)


def test_tests_stand_where_their_code_stands() -> None:
    misplaced = [
        str(path.parent.relative_to(ROOT))
        for floor in FLOORS
        for path in (ROOT / "tests" / floor).rglob("test_*.py")
        if not (ROOT / path.parent.relative_to(ROOT / "tests")).is_dir()
        and path.parent.name not in PARTS_OF_TESTS
    ]
    assert not misplaced, "\n".join(sorted({*misplaced}))


@pytest.mark.parametrize("folder", sorted(MOST_WITHOUT_TEST))
def test_a_new_module_has_a_test_of_its_name(folder: str) -> None:
    without = [
        str(path)
        for path in modules(folder)
        if path.name != "__init__.py"
        and not (ROOT / "tests" / path.with_name(f"test_{path.name}")).exists()
    ]
    assert len(without) <= MOST_WITHOUT_TEST[folder], "\n".join(without)


@pytest.mark.heavy
def test_tests_import_no_floor_above_theirs() -> None:
    """Neither its code nor its tests: what judges two floors is a test of the upper one."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for floor in FLOORS
        for path in sorted((ROOT / "tests" / floor).rglob("*.py"))
        for line, name in imports(path.relative_to(ROOT))
        if (above := name.removeprefix("tests.").split(".")[0]) in FLOORS
        and FLOORS.index(above) > FLOORS.index(floor)
        and not (floor == "kernels" and name.startswith(CHECKS))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("folder", sorted(FORBIDDEN))
def test_rooms_stay_light(folder: str) -> None:
    wrong = [
        f"{path}:{line} imports {name}"
        for path in modules(folder)
        for line, name in imports(path)
        if name.split(".")[0] in FORBIDDEN[folder]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.heavy
def test_processes_that_compute_nothing_start_without_torch() -> None:
    """Importing it takes longer than all the rest, and streams wait for a new scheduler."""
    script = "import sys, actors.engine.scheduler, app.server; print({'torch'} & {*sys.modules})"
    ran = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert ran.stdout == "set()\n", ran.stderr


def test_only_the_actor_file_of_a_stage_knows_ray() -> None:
    wrong = [
        f"{path}:{line}"
        for path in modules("actors/stage")
        for line, name in imports(path)
        if name.split(".")[0] == "ray" and path.name != "actor.py"
    ]
    assert not wrong, "\n".join(wrong)


def test_compiled_graphs_live_in_one_file() -> None:
    wrong = [
        f"{path}:{line}"
        for path in modules()
        for line, name in imports(path)
        if name.startswith("ray.dag") and path.name != "graph_pipeline.py"
    ]
    assert not wrong, "\n".join(wrong)


def test_policies_see_the_step_builder_alone() -> None:
    """Neither queue nor memory: what a policy may do is a method of the builder."""
    wrong = [
        f"{path}:{line} imports {name}"
        for path in modules("actors/scheduling/policies")
        for line, name in imports(path)
        if {"queue", "memory", "lifecycle"} & set(name.split("."))
    ]
    assert not wrong, "\n".join(wrong)


def test_modules_do_not_import_in_circles() -> None:
    """Not for types either, nor within functions."""
    graph: dict[Path, set[Path]] = {}
    for path in modules():
        targets = {module_of(name) for _, name in imports(path)}
        graph[path] = {target for target in targets if target is not None and target != path}
    done: set[Path] = set()

    def visit(path: Path, trail: tuple[Path, ...]) -> None:
        assert path not in trail, " -> ".join(map(str, (*trail[trail.index(path) :], path)))
        if path not in done:
            for target in graph[path]:
                visit(target, (*trail, path))
            done.add(path)

    for path in graph:
        visit(path, ())


def test_files_fit_in_a_head() -> None:
    long = [
        f"{path}: {num_lines} lines"
        for path in modules()
        if (num_lines := (ROOT / path).read_text().count("\n")) > 315
    ]
    assert not long, "\n".join(long)
