"""Fleets over several nodes, each test in a process and a cluster of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serve.own_process import output_of


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["drained", "killed"])
def test_streams_outlive_the_node_of_their_engine(how: str, tmp_path: Path) -> None:
    assert "nothing was lost" in output_of("tests.serve.nodes_leave", how, folder=tmp_path)


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_prompts_and_streams_on_different_nodes(tmp_path: Path) -> None:
    assert "nothing was lost" in output_of("tests.serve.nodes_split", folder=tmp_path)
