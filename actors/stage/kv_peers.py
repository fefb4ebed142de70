"""A rank's KV for ranks of other engines: it is served to them, and theirs is found."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path

import msgpack
import torch

from actors.stage.kv import KVCache
from actors.stage.spec import TierSpec
from actors.stage.tier.connections import KnownPeers, PeerAddress
from actors.stage.tier.direct import AT_ONCE, DeviceBlocks, DirectPeers, DirectServer
from actors.stage.tier.remote import RemoteShares, ShareServer
from actors.stage.tier.shared import SharedTier
from actors.transport.addresses import free_address
from actors.transport.device_pair import DevicePair
from actors.transport.node_directory import NodeDirectory, has_other_nodes, this_host, this_node

logger = logging.getLogger("legato.tier")


def of_this_node(spec: TierSpec) -> TierSpec:
    """between_nodes: decided, if it depends on how many nodes there are; then the shares of each
    node are apart, also where two run on one machine."""
    between = has_other_nodes() if spec.between_nodes is None else spec.between_nodes
    if not between:
        return replace(spec, between_nodes=False)
    folder = Path(spec.shared_folder)
    apart = folder.with_name(f"{folder.name}-{this_node()[:12]}")
    return replace(spec, between_nodes=True, shared_folder=str(apart))


def remote_shares(spec: TierSpec, own: SharedTier) -> RemoteShares | None:
    """Serve the own share to other nodes, and find theirs; None where it cannot listen."""
    try:
        server = ShareServer(this_host(), own.path)
    except OSError as error:
        logger.error("KV is not shared between nodes: %s", error)
        return None
    peers = _known(f"kv {spec.key}", server.address, lists_node=False)
    return RemoteShares(peers, own.content_bytes)


class DirectWay:
    """From this rank's device to those of other engines, and back: `blocks` and `peers`."""

    def __init__(self, spec: TierSpec, cache: KVCache, device: torch.device) -> None:
        """Raises OSError where it cannot listen, and RuntimeError where memory is lacking. A fifth
        of the memory, at most, is where blocks arrive."""
        host = this_host() if spec.between_nodes else "127.0.0.1"
        kind = f"kv direct {spec.key} {'' if spec.between_nodes else this_node()}"
        make_pair = partial(DevicePair, device=device)
        num_places = spec.direct_bytes // cache.block_bytes
        num_landing = max(1, min(AT_ONCE, num_places // 5))
        landing = cache.device_places(num_landing)
        self.blocks = DeviceBlocks(cache.device_places(num_places - num_landing))
        self._server = DirectServer(host, self.blocks, make_pair, partial(free_address, host))
        peers = _known(kind, self._server.address, lists_node=True)
        self.peers = DirectPeers(peers, make_pair, landing)
        self.peers.start()


def direct_way(spec: TierSpec, cache: KVCache, device: torch.device) -> DirectWay | None:
    """None where there can be none."""
    try:
        return DirectWay(spec, cache, device)
    except (OSError, RuntimeError) as error:
        logger.error("KV goes through host memory: %s", error)
        return None


def _known(kind: str, own: PeerAddress, lists_node: bool) -> KnownPeers:
    """Tell the own address, and follow those of others; lists_node: see `NodeDirectory`."""
    directory = NodeDirectory(kind, _packed(own), this_node(), lists_node)
    directory.start()

    def find() -> Sequence[PeerAddress]:
        return [PeerAddress(*msgpack.unpackb(told)) for told in directory.others()]

    return KnownPeers(find, lambda peer: directory.drop(_packed(peer)))


def _packed(address: PeerAddress) -> bytes:
    packed: bytes = msgpack.packb(astuple(address))
    return packed
