"""The HTTP server of a replica that answers on a port of its own."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import re
import resource
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from app.api.http.connections import RequestProtocol
from app.api.http.refusals import NO_FILE_LEFT, Refused, Reserve

KEEP_ALIVE_S: Final = 30  # an idle connection's life between two requests
_BACKLOG: Final = 2048
_LAST_CALL_S: Final = 0.1  # for requests that have been sent to a server that closes
_MOST_FILES: Final = 1 << 16
_SPARE_FILES: Final = 512  # for all files except connections
_NUM_ACCEPTED_AT_ONCE: Final = 64
_NO_FILES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_CHECK_AGAIN_S: Final = 0.1
_TURN_WITHIN_S, _TURN_AGAIN_S = 2.0, 0.001  # others hold it for as long as they read a file
_NAMES: Final = Path("/proc/net/unix")  # of all sockets that have one, in this network
_EVERY_ADDRESS: Final = frozenset({"0.0.0.0", "::"})
_logger = logging.getLogger("legato.http")


class _Config(uvicorn.Config):
    max_connections: int | None = None
    errors: Counter[tuple[int, str]]


class HttpServer:
    """An HTTP server on the running event loop.

    The port is shared (SO_REUSEPORT), so that a replica's successor can open it while the
    predecessor, which has stopped accepting, finishes its streams; and only with servers of the
    same owner.
    """

    _listener: Listener
    _claim: socket.socket | None = None

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        *,
        max_connections: int = 8192,
        errors: Counter[tuple[int, str]] | None = None,
        owner: str | None = None,
    ) -> None:
        """errors: counts answers before the application by status and code. owner: of the port;
        None: nobody is asked."""
        self._address, self._owner = (host, port), owner
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
        config.errors = Counter() if errors is None else errors
        config.load()
        self._config = config
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)

    async def open(self) -> None:
        """Accept connections; raises OSError if the address is not available."""
        if self._owner is not None:
            self._claim = _claim(*self._address, self._owner)
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
        make = partial(RequestProtocol, self._config, state, {})
        self._listener = Listener(listening, make, self._config.errors)
        _logger.info("listening on %s:%d", *listening.getsockname()[:2])

    async def close(self) -> None:
        """Stop accepting, and return once every request that came before is answered."""
        await self._listener.close()
        if self._claim is not None:
            self._claim.close()
        await asyncio.sleep(_LAST_CALL_S)  # the shutdown resets connections with an unread request
        await self._server.shutdown()


class Listener:
    """Accepts connections, and refuses them with an answer while no more files may be opened.

    The event loops' own listeners do worse: asyncio's leaves such connections waiting, a second at
    a time, and libuv's closes them without an answer, which looks like a crash to a client.
    """

    def __init__(
        self,
        listening: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        errors: Counter[tuple[int, str]],
    ) -> None:
        """listening: does not block; the listener closes it. errors: counts the refusals. To be
        made on the running loop."""
        self._socket = listening
        self._make_protocol = make_protocol
        self._errors = errors
        self._loop = asyncio.get_running_loop()
        self._reserve = Reserve()
        self._opening: set[asyncio.Task[None]] = set()
        self._loop.add_reader(listening, self._accept)

    async def close(self) -> None:
        """Accept those who wait, as the system would reset them, and nobody after them."""
        self._loop.remove_reader(self._socket)
        for _ in range(_BACKLOG // _NUM_ACCEPTED_AT_ONCE):
            self._accept()
        self._socket.close()
        self._reserve.close()
        await asyncio.gather(*self._opening)

    def _accept(self) -> None:
        for _ in range(_NUM_ACCEPTED_AT_ONCE):
            try:
                connection, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_FILES:
                    raise
                self._refuse_next()
                return
            self._open(connection, self._make_protocol)

    def _open(self, connection: socket.socket, make: Callable[[], asyncio.Protocol]) -> None:
        connection.setblocking(False)

        async def open_it() -> None:
            try:
                await self._loop.connect_accepted_socket(make, connection)
            except OSError:  # it is gone already
                connection.close()

        task = self._loop.create_task(open_it())
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def _refuse_next(self) -> None:
        """Answer one connection, with the file descriptor that is held in reserve. If another
        thread takes that one first, the connection waits."""
        if self._reserve.give():
            with suppress(OSError):
                connection, _ = self._socket.accept()
                self._open(connection, lambda: Refused(self._reserve.fill))
                self._errors[NO_FILE_LEFT.counted] += 1
                return
        self._loop.remove_reader(self._socket)  # or it would call without end
        self._loop.call_later(_CHECK_AGAIN_S, self._check_again)

    def _check_again(self) -> None:
        if self._socket.fileno() >= 0:
            self._reserve.fill()
            self._loop.add_reader(self._socket, self._accept)


def _claim(host: str, port: int, owner: str) -> socket.socket | None:
    """A socket whose name tells servers of other owners that the port is taken: the system would
    give each of them a part of the connections. As a port, the name ends with its process and is
    of this network alone. Raises OSError where another owner has one; None but on Linux."""
    if not _NAMES.exists():
        return None
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    address = str(socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)[0][4][0])
    digest = hashlib.sha256(owner.encode()).hexdigest()[:16]
    with _turn(port):  # of two that begin at once, each would else see the other's
        try:
            names = _NAMES.read_text(errors="replace")
        except OSError:  # hidden by a sandbox
            names = ""
        claims = re.findall(rf"@legato-port/{port}/(\S+)/(\S+)/\S+$", names, re.MULTILINE)
        for other, owned in claims:
            is_one_family = (":" in other) == (":" in address)  # a server of "::" has IPv6 alone
            is_every = is_one_family and bool({other, address} & _EVERY_ADDRESS)
            if (other == address or is_every) and owned != digest:
                raise _taken()
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        claim.bind(f"\0legato-port/{port}/{address}/{digest}/{secrets.token_hex(4)}")
    return claim


def _turn(port: int) -> socket.socket:
    """Held by one process at a time, whatever its owner, until it is closed."""
    end_s = time.monotonic() + _TURN_WITHIN_S
    turn = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    while True:
        try:
            turn.bind(f"\0legato-port-turn/{port}")
        except OSError as error:
            is_late = time.monotonic() > end_s
            if error.errno != errno.EADDRINUSE or is_late:
                turn.close()
                raise _taken() if is_late else error from None
            time.sleep(_TURN_AGAIN_S)
        else:
            return turn


def _taken() -> OSError:
    return OSError(errno.EADDRINUSE, "another application of Legato answers there")


def _num_files() -> int:
    """The limit of open files of this process, raised to its maximum."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return _MOST_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted
