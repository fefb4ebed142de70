"""Requests that have arrived together are begun one after another.

Reading, checking and tokenizing a request takes a millisecond or two of the replica's event loop.
Twenty that arrive at once would hold back the tokens of all streams for as long as they all take,
since the loop runs whatever is ready before it looks for what the engine has sent. In turns, a
token waits for one of them.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """`await turns.next()` returns for one caller in each round of the event loop, in order."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_giving = False

    async def next(self) -> None:
        """A caller that is cancelled while it waits gives up its turn."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.append(turn)
        if not self._is_giving:
            self._is_giving = True
            loop.call_soon(self._give)
        await turn

    def _give(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                break
        self._is_giving = bool(self._waiting)
        if self._is_giving:
            asyncio.get_running_loop().call_soon(self._give)
