"""One server for all faults that it survives, and what is looked at after each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.surroundings import Canary, after_each, answer_largest, look
from tests.faults.within import BODY_TIMEOUT_S, SEND_TIMEOUT_S, STEP_DEADLINE_S
from tests.live.conftest import make_engine as make_engine  # a fixture of this room too
from tests.serve.server_process import Server, running
from tests.tiny_models import SLOW


@pytest.fixture(scope="session")
def canary(tiny_model: Callable[..., Path]) -> Iterator[Canary]:
    found = Canary(tiny_model("llama", **SLOW))
    yield found
    found.close()


@pytest.fixture(scope="session")
def settings(tiny_model: Callable[..., Path]) -> dict[str, Any]:
    """A small server whose limits are near."""
    return {
        "model": {"path": str(tiny_model("llama", **SLOW))},
        "scheduling": {"token_budget": 64, "max_requests": 64},
        "kv": {"block_size": 4, "memory_gib": 0.01},
        "engine": {"step_deadline_s": STEP_DEADLINE_S, "standby": True},
        "api": {"send_timeout_s": SEND_TIMEOUT_S, "body_timeout_s": BODY_TIMEOUT_S},
    }


@pytest.fixture(scope="session")
def faulted_server(
    settings: dict[str, Any], canary: Canary, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    parallel = {"pipeline_stages": 2}
    with running(tmp_path_factory.mktemp("faults"), {**settings, "parallel": parallel}) as server:
        canary.check(server)
        answer_largest(server)
        yield server


@pytest.fixture
def server(faulted_server: Server, canary: Canary) -> Iterator[Server]:
    """The shared one; after the test it must be as it was, which the next one builds upon."""
    before = look(faulted_server)
    yield faulted_server
    after_each(faulted_server, before, canary)
