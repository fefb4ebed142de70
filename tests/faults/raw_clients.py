"""Clients that write HTTP by hand, and may stop in the middle."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tests.serve.server_process import Server


def address(server: Server) -> tuple[str, int]:
    return "127.0.0.1", int(server.url.rpartition(":")[2])


def head(path: str, *lines: str, method: str = "POST") -> bytes:
    shown = ["host: 127.0.0.1", "content-type: application/json", *lines]
    return "\r\n".join([f"{method} {path} HTTP/1.1", *shown, "", ""]).encode()


def whole(path: str, body: Any) -> bytes:
    content = json.dumps(body).encode()
    return head(path, f"content-length: {len(content)}") + content


@contextmanager
def connected(server: Server, sent: bytes, num_clients: int = 1) -> Iterator[list[socket.socket]]:
    """Clients that send this and read nothing by themselves."""
    clients = []
    try:
        for _ in range(num_clients):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(30)
            client.connect(address(server))
            client.sendall(sent)
            clients.append(client)
        yield clients
    finally:
        for client in clients:
            client.close()


def is_closed(client: socket.socket) -> bool:
    """Closed or reset by the server, as far as the kernel knows (the state is not ESTABLISHED)."""
    return client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != 1


def status_of(client: socket.socket) -> int:
    """The status of the answer that comes, 0 where the connection just ends."""
    with suppress(ConnectionError):
        answer = client.recv(1 << 16)
        return int(answer.split(b" ")[1]) if answer else 0
    return 0
