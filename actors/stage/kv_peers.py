"""A rank's share of KV between nodes: it is served to others, and theirs are found."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import astuple, replace
from pathlib import Path

import msgpack

from actors.stage.spec import TierSpec
from actors.stage.tier.remote import PeerAddress, RemoteShares, ShareServer
from actors.stage.tier.shared import SharedTier
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
    directory = NodeDirectory(f"kv {spec.key}", _packed(server.address), this_node())
    directory.start()

    def find() -> Sequence[PeerAddress]:
        return [PeerAddress(*msgpack.unpackb(told)) for told in directory.others()]

    return RemoteShares(find, lambda peer: directory.drop(_packed(peer)), own.content_bytes)


def _packed(address: PeerAddress) -> bytes:
    packed: bytes = msgpack.packb(astuple(address))
    return packed
