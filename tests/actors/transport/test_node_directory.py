"""Processes find those of other nodes in the cluster's store, and only of their own kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.transport.node_directory import NodeDirectory, has_other_nodes, this_node

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def test_those_of_a_kind_find_each_other(tmp_path: Path) -> None:
    kind = str(tmp_path)
    told = [
        NodeDirectory(kind, bytes([n]), node, alive=lambda: "abc") for n, node in enumerate("aab")
    ]
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


def test_those_of_a_node_that_is_gone_are_forgotten_by_all(tmp_path: Path) -> None:
    kind = str(tmp_path)
    here = NodeDirectory(kind, b"here", this_node(), lists_node=True)
    neighbor = NodeDirectory(kind, b"neighbor", this_node())
    earlier_version = NodeDirectory(kind, b"earlier", "")
    gone = NodeDirectory(kind, b"gone", 56 * "0")
    for one in (here, neighbor, earlier_version, gone):
        one.put()
    here.read()
    assert sorted(here.others()) == [b"earlier", b"neighbor"]
    witness = NodeDirectory(kind, b"", this_node(), alive=lambda: [this_node(), 56 * "0"])
    witness.read()
    assert witness.others() == [b"earlier"], "it is deleted for others too"


def test_all_others_of_the_own_node_are_found_where_they_are_listed(tmp_path: Path) -> None:
    told = [NodeDirectory(str(tmp_path), bytes([n]), this_node(), True) for n in range(3)]
    for one in told:
        one.put()
    for one in told:
        one.read()
    assert sorted(told[0].others()) == [bytes([1]), bytes([2])]


def test_a_lone_node_has_no_others() -> None:
    assert not has_other_nodes()
