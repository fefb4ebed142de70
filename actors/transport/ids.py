"""Whose a request is, told by its id: every connection to a scheduler has a range of its own."""

from __future__ import annotations

_IDS_PER_CONNECTION = 1 << 40


def first_id(connection: int) -> int:
    """The ids of a connection's requests are this one and those above it; 0 is the owner's."""
    return connection * _IDS_PER_CONNECTION


def connection_of(request_id: int) -> int:
    """Whose request this is."""
    return request_id // _IDS_PER_CONNECTION
