"""Fixtures shared by every room: tiny models, made once per run."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from tests import quick

# No test reaches for the network, and tokenizers must not warn about forks.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Nor trusts a certificate: to read all there are takes 40 ms at every call of httpx's functions.
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)
os.environ.pop("SSL_CERT_FILE", None)
# Torch computes in one thread where a test does not say otherwise: tiny tensors take several times
# as long in two, and each test worker has one core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Typer's messages are printed for a wide terminal: no path is broken over two lines.
os.environ["TERMINAL_WIDTH"] = "400"
# Without a GPU, Triton's kernels run interpreted; it decides that when it is first imported,
# which other libraries may do, so it must be said here.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# What engines measure of this machine stays with the run, for all of its workers to read.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["LEGATO_CACHE"] = tempfile.mkdtemp(prefix="legato-cache-")
    atexit.register(shutil.rmtree, os.environ["LEGATO_CACHE"], ignore_errors=True)

# Servers that last for many tests, which are kept on one worker.
SHARED = {
    "demo": "shared servers",
    "own_serve": "shared servers",
    "faulted_server": "shared servers",
    "served_fleet": "served fleet",
    "console_server": "console",
}
# Those and what else lasts: not beyond the tests of processes.
LASTING = ("ray_cluster", "browser_process", *SHARED)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="pure tests: no Ray, no tensors")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--quick"):
        os.environ.setdefault("LEGATO_HYPOTHESIS", "quick")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not config.getoption("--quick"):
        return None
    if collection_path.is_dir():  # a folder's conftest may itself import what is left out
        modules = list(collection_path.rglob("test_*.py"))
        return (bool(modules) and not any(map(quick.is_quick, modules))) or None
    name = collection_path.name
    return (name.startswith("test_") and not quick.is_quick(collection_path)) or None


def pytest_collection_finish() -> None:
    """What came with the tests' modules stays. Collections that pass over all of it, again and
    again, would take a twentieth of the time, as would one for every 700 objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that start processes come first, then those of tensors, so that two workers end
    together (`make test`), and most tests have no idle servers beside them."""
    if config.getoption("--quick"):
        left_out = [item for item in items if _has_marker(item, quick.LEFT_OUT)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not _has_marker(item, quick.LEFT_OUT)]
    items.sort(key=lambda item: (not _has_marker(item, quick.PROCESSES), not _is_slow(item)))
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            if item.get_closest_marker("xdist_group") is None:
                item.add_marker(pytest.mark.xdist_group(_group(item)))


def _is_slow(item: pytest.Item) -> bool:
    return _has_marker(item, quick.SLOW)


def _has_marker(item: pytest.Item, names: tuple[str, ...]) -> bool:
    return any(item.get_closest_marker(name) for name in names)


def _group(item: pytest.Item) -> str:
    """Tests of one group run on one worker: those of a module, and all that call one server. A
    test with processes of its own is a group by itself."""
    for name in getattr(item, "fixturenames", ()):
        if name in SHARED:
            return SHARED[name]
    fixtures = getattr(item, "_fixtureinfo", None)
    definitions = fixtures.name2fixturedefs.values() if fixtures is not None else ()
    of_module = any(d[-1].scope == "module" for d in definitions)
    if _is_slow(item) and not of_module:
        return item.nodeid
    module = item.nodeid.split("::")[0]
    return f"{module} processes" if _has_marker(item, quick.PROCESSES) else module


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    """A worker's cluster, servers and browser end before its first test without processes: no test
    after that needs them, and at rest they would take a tenth of two cores."""
    if not _has_marker(item, quick.PROCESSES):
        definitions = item.session._fixturemanager._arg2fixturedefs
        for server in [d for name in LASTING for d in definitions.get(name, ())]:
            server.finish(item._request)  # type: ignore[attr-defined]
    yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    before = "ray" in sys.modules  # another test's fault
    yield
    if item.config.getoption("--quick"):
        assert before or "ray" not in sys.modules, "a test of `--quick` imported Ray: mark it"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_model("qwen3")` is a folder of that variant (see tests/tiny_models.py), made once."""
    root = tmp_path_factory.mktemp("models")
    made: dict[str, Path] = {}

    def get(variant: str = "llama", **options: object) -> Path:
        from tests import tiny_models

        key = "-".join([variant, *(f"{k}.{v}" for k, v in sorted(options.items()))])
        if key not in made:
            made[key] = tiny_models.write(root / key, variant, **options)  # type: ignore[arg-type]
        return made[key]

    return get


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """Real Ray, this process as the driver; one cluster per run, gone at the end."""
    from app.ray_environment import ENVIRONMENT

    # Without HAProxy: its ports are one set per machine, and a server under test may hold them.
    os.environ.update(ENVIRONMENT | {"RAY_SERVE_ENABLE_HA_PROXY": "0"})
    import ray

    from app.cli.forked_workers import ForkServer
    from app.cli.local_ray import start_ray

    # Ray keeps sockets below this folder: short, or they exceed the system's path limit.
    folder = tempfile.mkdtemp(prefix="lgt", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        # Workers find the tests' own actors. A `runtime_env` would start each of them twice.
        root = Path(__file__).resolve().parents[1]
        patch.setenv("PYTHONPATH", str(root), prepend=os.pathsep)
        forks = ForkServer()
        # GPUs are claimed: Ray hands their numbers out, and nothing computes on them.
        start_ray(4, forks, num_gpus=2, _temp_dir=folder)
    with pytest.MonkeyPatch.context() as patch:  # not by default, where torch is built for CUDA
        patch.setattr("app.main.takes_gpus", lambda device, _: device == "cuda")
        yield
    ray.shutdown()
    forks.close()
    shutil.rmtree(folder, ignore_errors=True)
