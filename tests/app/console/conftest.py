"""The browser of the console's tests, and a server for it: one of each for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.app.console.chromium import chromium
from tests.serve.server_process import ROOT, Server, running


@pytest.fixture(scope="session")
def browser_process() -> Iterator[Any]:
    with chromium(1400, 1000) as driver:
        yield driver


@pytest.fixture
def browser(browser_process: Any) -> Iterator[Any]:
    """A window of its own, which takes its page, its session and what emulates it along."""
    first = browser_process.current_window_handle
    browser_process.switch_to.new_window("window")
    browser_process.set_window_size(1400, 1000)
    browser_process.get_log("browser")  # of windows before
    yield browser_process
    browser_process.close()
    browser_process.switch_to.window(first)


@pytest.fixture(scope="session")
def console_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    args = {
        "model": {"path": str(ROOT / "configs/models/demo")},
        "scheduling": {"token_budget": 128, "max_requests": 32},
        "kv": {"memory_gib": 0.3},
        "slo": {"tbt_ms": 1},  # which no step keeps
    }
    with running(tmp_path_factory.mktemp("console"), args) as started:
        yield started


@pytest.fixture
def server(console_server: Server) -> Server:
    return console_server
