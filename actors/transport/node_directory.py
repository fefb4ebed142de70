"""What processes of one kind tell those on other nodes, or all: entries in Ray's key-value store.

A thread reads the entries and repeats its own, so that nobody waits for the cluster. An entry whose
process has died stays until somebody finds that out, or its node is gone: a removed machine refuses
no connection, so that whoever asks it waits.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
from collections.abc import Callable, Collection
from typing import Final

import msgpack
import ray
from ray.experimental import internal_kv

logger = logging.getLogger("legato.transport")

_NAMESPACE: Final = "legato"
_READ_EVERY_S: Final = 2.0
_REPEAT_EVERY: Final = 15  # readings


def this_node() -> str:
    """The id of the Ray node of this process."""
    return str(ray.get_runtime_context().get_node_id())


def this_host() -> str:
    """Where processes of other nodes reach this one."""
    return str(ray.util.get_node_ip_address())


def alive_nodes() -> set[str]:
    """The ids of the cluster's nodes now."""
    return {str(node["NodeID"]) for node in ray.nodes() if node["Alive"]}


def has_other_nodes() -> bool:
    """Whether the cluster has more than one now."""
    return len(alive_nodes()) > 1


class NodeDirectory:
    """kind: all that tell each other. own: what this process tells. node: the id of its own.
    lists_node: also those of its own node are listed. alive: the ids of nodes that are there."""

    def __init__(
        self,
        kind: str,
        own: bytes,
        node: str,
        lists_node: bool = False,
        alive: Callable[[], Collection[str]] = alive_nodes,
    ) -> None:
        self._prefix = f"nodes/{hashlib.sha256(kind.encode()).hexdigest()[:32]}/"
        self._name = f"{self._prefix}{secrets.token_hex(8)}"
        self._node = node
        self._lists_node = lists_node
        self._alive = alive
        self._own: bytes = msgpack.packb((node, own))
        self._entries: dict[str, tuple[str, bytes]] = {}  # name -> (node, what it tells)
        self._lost: set[str] = set()

    def start(self) -> None:
        """Follow the others from now on."""
        threading.Thread(target=self._follow, name="legato-nodes", daemon=True).start()

    def others(self) -> list[bytes]:
        """What the other processes tell, as last read."""
        entries = list(self._entries.values())
        return [told for node, told in entries if self._lists_node or node != self._node]

    def drop(self, told: bytes) -> None:
        """The process that tells this has died."""
        self._lost |= {name for name, (_, known) in self._entries.items() if known == told}

    def put(self) -> None:
        """Write the own entry."""
        internal_kv._internal_kv_put(self._name, self._own, namespace=_NAMESPACE)

    def read(self) -> None:
        """Read what is new, and delete the entries of the dead and of nodes that are gone."""
        lost, self._lost = self._lost, set()
        _delete(lost)
        found: dict[str, tuple[str, bytes]] = {}
        for key in internal_kv._internal_kv_list(self._prefix, namespace=_NAMESPACE):
            name = key.decode()
            if name not in lost and name != self._name:
                known = self._entries.get(name) or _read(name)
                if known is not None:
                    found[name] = known
        if any(node != self._node for node, _ in found.values()):
            alive = self._alive()  # asked after the entries: a node is there before they are
            # An entry without a node is that of a process of an earlier version.
            gone = {name for name, (node, _) in found.items() if node and node not in alive}
            found = {name: known for name, known in found.items() if name not in gone}
            _delete(gone)
        self._entries = found

    def _follow(self) -> None:
        pause, number = threading.Event(), 0
        while True:
            try:
                if number % _REPEAT_EVERY == 0:
                    self.put()
                self.read()
                number += 1
            except Exception as error:  # the GCS is down: what is known stays
                logger.debug("what other nodes tell is not known: %s", error)
            pause.wait(_READ_EVERY_S)


def _delete(names: Collection[str]) -> None:
    for name in names:
        internal_kv._internal_kv_del(name, namespace=_NAMESPACE)


def _read(name: str) -> tuple[str, bytes] | None:
    packed = internal_kv._internal_kv_get(name, namespace=_NAMESPACE)
    if packed is None:
        return None
    node, told = msgpack.unpackb(packed)
    return str(node), bytes(told)
