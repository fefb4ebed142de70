"""How long the graphs of a stage live."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.stage.cuda.graphs import StepGraphs
from tests.actors.stage.mini_planner import make_runner


def test_graphs_end_before_the_communicator_that_they_use(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL waits for the end of all graphs that hold its operations before it ends itself."""
    runner = make_runner(tiny_model("llama"))
    graphs = StepGraphs.__new__(StepGraphs)
    runner._graphs, alive = graphs, weakref.ref(graphs)
    del graphs
    seen: list[object] = []
    monkeypatch.setattr(runner._group, "close", lambda: seen.append(alive()))
    runner.close()
    assert seen == [None]
