"""What an engine of a fleet needs to be found."""

from __future__ import annotations

from typing import Protocol

from actors.peers import Door


class Membership(Protocol):
    """How an engine is found by the fronts of its fleet: every life of its scheduler anew."""

    def new_door(self) -> Door:
        """For the next life."""
        ...

    async def join(self, door: Door, tcp_address: str | None) -> None:
        """It lets fronts in."""
        ...

    async def part(self) -> None:
        """It does not any more."""
        ...
