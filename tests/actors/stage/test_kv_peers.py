"""A share between nodes: apart from those of other nodes, served, and its own node not asked."""

from __future__ import annotations

import time
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path

import msgpack
import pytest
import torch

from actors.stage import kv_peers
from actors.stage.kv import KVCache
from actors.stage.kv_peers import direct_way, of_this_node, remote_shares
from actors.stage.spec import TierSpec
from actors.stage.tier.remote import ShareServer
from actors.stage.tier.shared import SharedTier
from actors.transport.node_directory import NodeDirectory
from kernels.interface import AttentionShape
from kernels.registry import resolve_backend
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
    unnamed = ""  # a node that is named has to be there
    NodeDirectory(f"kv {spec.key}", msgpack.packb(astuple(server.address)), unnamed).put()

    end_s = time.monotonic() + 60
    while not (found := list(here.load([digest(2), digest(1)], end_s))):
        assert time.monotonic() < end_s
        time.sleep(0.05)  # polling, bounded
    assert [content[-SIZE:] for content in found] == [block(2)]
    server.close()


CPU = torch.device("cpu")


def test_devices_of_two_engines_find_each_other(tmp_path: Path) -> None:
    backend = resolve_backend("torch", CPU, torch.float32, 4, None)
    cache = KVCache(backend, [AttentionShape(4, 2, 16, 0.25)] * 2, 3, 0, 4, torch.float32, CPU)
    spec = TierSpec(str(tmp_path), "", 0, 0, direct_bytes=3 * cache.block_bytes)
    one, other = (direct_way(spec, cache, CPU) for _ in range(2))
    assert one is not None
    assert other is not None
    content = torch.arange(cache.block_bytes // 4).float().view(torch.uint8)
    cache.copy_in([1], content[None])
    assert one.blocks.put(digest(1), partial(cache.copy_out, 1))
    end_s = time.monotonic() + 60
    while not (found := [p.clone() for p in other.peers.load([digest(1), digest(2)], end_s)]):
        assert time.monotonic() < end_s
        time.sleep(0.05)  # polling, bounded
    assert torch.equal(found[0], content[None])
    other.peers.close()


def test_a_device_without_memory_for_it_goes_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    backend = resolve_backend("torch", CPU, torch.float32, 4, None)
    cache = KVCache(backend, [AttentionShape(4, 2, 16, 0.25)] * 2, 3, 0, 4, torch.float32, CPU)
    asked: list[int] = []

    def fails(num_blocks: int) -> torch.Tensor:
        asked.append(num_blocks)
        if len(asked) == 2:
            raise torch.OutOfMemoryError("no memory")
        return torch.zeros(num_blocks, 1)

    monkeypatch.setattr(cache, "device_places", fails)
    monkeypatch.setattr(kv_peers, "DirectServer", pytest.fail)
    spec = TierSpec(str(tmp_path), "", 0, 0, direct_bytes=10 * cache.block_bytes)
    assert direct_way(spec, cache, CPU) is None
    assert sum(asked) == 10, "where blocks arrive counts too"
