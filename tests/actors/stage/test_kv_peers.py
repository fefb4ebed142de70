"""A share between nodes: apart from those of other nodes, served, and its own node not asked."""

from __future__ import annotations

import time
from dataclasses import astuple, replace
from pathlib import Path

import msgpack
import pytest

from actors.stage.kv_peers import of_this_node, remote_shares
from actors.stage.spec import TierSpec
from actors.stage.tier.remote import ShareServer
from actors.stage.tier.shared import SharedTier
from actors.transport.node_directory import NodeDirectory
from tests.actors.stage.tier.test_shared import SIZE, block, digest

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def test_shares_are_apart_only_between_nodes(tmp_path: Path) -> None:
    spec = TierSpec("key", "", 0, 0, shared_folder=str(tmp_path / "m/rank"))
    never = of_this_node(replace(spec, between_nodes=None))  # a cluster of one node
    assert (never.between_nodes, never.shared_folder) == (False, spec.shared_folder)
    always = of_this_node(replace(spec, between_nodes=True))
    assert always.between_nodes is True
    assert Path(always.shared_folder).parent == tmp_path / "m"
    assert always.shared_folder != spec.shared_folder
    assert of_this_node(replace(spec, between_nodes=True)) == always


def test_a_share_of_another_node_is_found_and_none_of_this_one(tmp_path: Path) -> None:
    spec = TierSpec(str(tmp_path), "", 0, 0, between_nodes=True)
    tiers = [SharedTier(tmp_path / name / "m/rank", spec.key, SIZE, 1 << 20) for name in "abc"]
    for number, tier in enumerate(tiers):
        tier.put(digest(number), block(number))
    here, neighbor = (remote_shares(spec, tier) for tier in tiers[:2])
    assert here is not None
    assert neighbor is not None
    server = ShareServer("127.0.0.1", tiers[2].path)
    NodeDirectory(f"kv {spec.key}", msgpack.packb(astuple(server.address)), "another node").put()

    end_s = time.monotonic() + 60
    while not (found := list(here.load([digest(2), digest(1)], end_s))):
        assert time.monotonic() < end_s
        time.sleep(0.05)  # polling, bounded
    assert [content[-SIZE:] for content in found] == [block(2)]
    server.close()
