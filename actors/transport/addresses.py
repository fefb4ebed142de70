"""Socket addresses and secrets of an engine's processes (see `wire`)."""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
from pathlib import Path

SECRET_BYTES = 32


def private_directory() -> Path:
    """A fresh directory only this user may enter, short enough for a socket path (108 bytes)."""
    return Path(tempfile.mkdtemp(prefix="legato-", dir="/tmp" if os.path.isdir("/tmp") else None))


def new_secret() -> bytes:
    """The secret with which a connection must begin, if others might connect."""
    return secrets.token_bytes(SECRET_BYTES)


def new_local_address() -> str:
    """The address of an abstract Unix socket, used by no other."""
    return f"@legato-{secrets.token_hex(8)}"


def is_path(address: str) -> bool:
    return "/" in address


def is_local(address: str) -> bool:
    return address.startswith("@")


def host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def free_address(host: str) -> str:
    """An address of this node, "host:port", with a port that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind((host, 0))
        return f"{host}:{sock.getsockname()[1]}"
