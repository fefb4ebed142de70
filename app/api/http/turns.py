"""The order in which requests begin that arrive together."""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """`await turns.next()` returns for one caller in each round of the event loop, in order.

    A request takes a millisecond or two to be read and tokenized. Twenty that arrive together would
    delay the tokens of all streams by as long as they all take; in turns, by one of them."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_giving = False

    async def next(self) -> None:
        """A caller that is cancelled while it waits gives up its turn."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._go_on()
        await turn

    def _go_on(self) -> None:
        if self._waiting and not self._is_giving:
            self._is_giving = True
            asyncio.get_running_loop().call_soon(self._give)

    def _give(self) -> None:
        self._is_giving = False
        if not (turn := self._waiting.popleft()).done():
            turn.set_result(None)
        self._go_on()
