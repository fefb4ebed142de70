"""Ports for servers under test."""

from __future__ import annotations

import os
import socket

# Below the ports that systems give to outgoing connections, of which one may take a port between
# the moment it is found free and its use; above those of Ray's workers.
_FIRST, _NUM_PORTS = 20_000, 12_000
_next = os.getpid() * 997  # the suite's processes begin at different ones


def free_port() -> int:
    """A loopback port that nothing listens on; another one at each call."""
    global _next
    for _ in range(_NUM_PORTS):
        port, _next = _FIRST + _next % _NUM_PORTS, _next + 1
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no port is free")
