"""Fixtures shared by every room: tiny models, made once per run."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# No test reaches for the network, and tokenizers must not warn about forks.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Without a GPU, Triton's kernels run interpreted; it decides that when it is first imported,
# which other libraries may do, so it must be said here.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


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
    from app.cli.serve import ENVIRONMENT

    # Without HAProxy: its ports are one set per machine, and a server under test may hold them.
    os.environ.update(ENVIRONMENT | {"RAY_SERVE_ENABLE_HA_PROXY": "0"})
    import ray

    # Ray keeps sockets below this folder: short, or they exceed the system's path limit.
    folder = tempfile.mkdtemp(prefix="lgt", dir="/tmp")
    root = str(Path(__file__).resolve().parents[1])
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        _temp_dir=folder,
        runtime_env={"env_vars": {"PYTHONPATH": root}},
    )
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
