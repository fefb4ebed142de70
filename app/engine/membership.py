"""What an engine of a fleet needs to be found."""

from __future__ import annotations

from typing import Protocol

from actors.peers import Door


class Membership(Protocol):
    """How fronts of a fleet find an engine: each scheduler that is built for it joins anew."""

    def new_door(self) -> Door:
        """Where the next scheduler is to accept fronts."""
        ...

    async def join(self, door: Door, tcp_address: str | None) -> None:
        """Tell fronts that the engine accepts them there."""
        ...

    async def part(self) -> None:
        """Tell fronts that it takes nothing more."""
        ...
