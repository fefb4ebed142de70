"""What an engine of a fleet needs to be found."""

from __future__ import annotations

from typing import Protocol

from actors.engine.peers import FrontAddress


class Membership(Protocol):
    """How fronts of a fleet find an engine: each scheduler that is built for it joins anew."""

    def new_front_address(self) -> FrontAddress:
        """Where the next scheduler is to accept fronts."""
        ...

    async def join(self, fronts: FrontAddress, tcp_address: str | None) -> None:
        """Publish to fronts that the engine accepts them there."""
        ...

    async def part(self) -> None:
        """Publish to fronts that it takes nothing more."""
        ...
