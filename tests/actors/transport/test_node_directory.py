"""Processes find those of other nodes in the cluster's store, and only of their own kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.transport.node_directory import NodeDirectory, has_other_nodes

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def test_those_of_a_kind_find_each_other(tmp_path: Path) -> None:
    kind = str(tmp_path)
    told = [NodeDirectory(kind, bytes([n]), node) for n, node in enumerate("aab")]
    stranger = NodeDirectory(f"{kind} of another model", b"x", "c")
    for one in (*told, stranger):
        one.put()
    for one in (*told, stranger):
        one.read()
    assert told[0].others() == told[1].others() == [bytes([2])]
    assert sorted(told[2].others()) == [bytes([0]), bytes([1])]
    assert stranger.others() == []

    told[0].drop(bytes([2]))
    told[0].read()
    told[1].read()
    assert told[0].others() == told[1].others() == []
    told[2].put()  # it lives after all
    told[1].read()
    assert told[1].others() == [bytes([2])]


def test_without_a_node_all_others_are_found(tmp_path: Path) -> None:
    told = [NodeDirectory(str(tmp_path), bytes([n]), None) for n in range(3)]
    for one in told:
        one.put()
    for one in told:
        one.read()
    assert sorted(told[0].others()) == [bytes([1]), bytes([2])]


def test_a_lone_node_has_no_others() -> None:
    assert not has_other_nodes()
