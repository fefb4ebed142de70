"""Every open port of a running server is a documented one, and none runs what it is sent."""

from __future__ import annotations

import os
import pickle
import socket
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.faults.surroundings import kind_of, processes
from tests.serve.server_process import Server

pytestmark = [pytest.mark.serve, pytest.mark.timeout(120)]


class _Touch:
    """Unpickled, it leaves a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self._path}",)


def open_ports(server: Server) -> set[tuple[str, str, int]]:
    """(kind of process, address, port) of all that listen, by TCP."""
    found = set()
    for process in processes(server):
        with suppress(psutil.Error):
            for one in process.net_connections(kind="tcp"):
                if one.status == psutil.CONN_LISTEN:
                    address = one.laddr.ip.removeprefix("::ffff:")
                    found.add((kind_of(process) or "spare worker", address, one.laddr.port))
    return found


def documented(server: Server, kind: str, address: str, port: int) -> bool:
    """What the table in SECURITY.md says of a lone replica."""
    if port == int(server.url.rpartition(":")[2]):
        return (kind, address) == ("ray::ServeReplica", "127.0.0.1")
    if address in ("127.0.0.1", "::1"):
        return True  # Ray's own, on loopback
    return kind in ("ray::ServeReplica",) and address in ("0.0.0.0", "::")


def test_row_25_ports_are_the_documented_ones_and_take_no_pickle(
    server: Server, tmp_path: Path
) -> None:
    ports = open_ports(server)
    assert ports
    unknown = sorted(p for p in ports if not documented(server, *p))
    assert unknown == [], "not in SECURITY.md"
    per_replica = [p for p in ports if p[1] not in ("127.0.0.1", "::1")]
    assert len(per_replica) <= 1, per_replica  # Serve's own, for handles
    mark = tmp_path / "unpickled"
    content = pickle.dumps(_Touch(mark))
    for _, address, port in ports:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
        with suppress(OSError), socket.create_connection((host, port), 2) as client:
            client.settimeout(0.2)
            client.sendall(len(content).to_bytes(4, "big") + content)
            client.sendall(content)
            with suppress(OSError):
                client.recv(1000)
    assert not mark.exists()
