"""The HTTP server of a replica that answers on a port of its own."""

from __future__ import annotations

import logging
import resource
import socket
from functools import partial
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from app.api.http.connections import Listener, RequestProtocol

KEEP_ALIVE_S: Final = 30  # an idle connection's life between two requests
_BACKLOG: Final = 2048
_MOST_FILES: Final = 1 << 16
_SPARE_FILES: Final = 512  # for all files except connections
_logger = logging.getLogger("legato.http")


class _Config(uvicorn.Config):
    max_connections: int | None = None


class HttpServer:
    """An HTTP server on the running event loop.

    The port is shared (SO_REUSEPORT), so that a replica's successor can open it while the
    predecessor, which has stopped accepting, finishes its streams.
    """

    _listener: Listener

    def __init__(self, app: ASGIApp, host: str, port: int, *, max_connections: int = 8192) -> None:
        self._address = (host, port)
        config = _Config(
            app,
            http=RequestProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        config.max_connections = min(max_connections, _num_files() - _SPARE_FILES)
        config.load()
        self._config = config
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)

    async def open(self) -> None:
        """Accept connections; raises OSError if the address is not available."""
        listening = socket.create_server(
            self._address,
            family=socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET,
            backlog=_BACKLOG,
            reuse_port=True,
        )
        listening.setblocking(False)
        # Not `Server.serve`, whose loop wakes ten times a second to update a header.
        await self._server.startup(sockets=[])
        state = self._server.server_state
        self._listener = Listener(listening, partial(RequestProtocol, self._config, state, {}))
        _logger.info("listening on %s:%d", *listening.getsockname()[:2])

    async def close(self) -> None:
        """Stop accepting, and return once every open answer is finished."""
        self._listener.close()
        await self._server.shutdown()


def _num_files() -> int:
    """The limit of open files of this process, raised to its maximum."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return _MOST_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted
