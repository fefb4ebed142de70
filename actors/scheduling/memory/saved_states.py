"""States that the stages keep of the beginnings of prompts, for models whose layers have states.

A state continues a request only from the position that it is of. It is therefore saved once a
prompt, at the end of its last full block but for the last token, and found by that block's digest.
Each has a row on the stages; the one used least recently gives way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class SavedStates:
    """Rows 0 .. num_rows - 1. A row is free, holds a saved state, or is being saved to."""

    __slots__ = ("_awaited", "_free", "_gone", "_row_of", "_saving", "num_rows")

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._gone: list[bytes] | None = None  # see `pop_gone`
        self.reset()

    def reset(self) -> None:
        """The stages are new: nothing is saved."""
        self._free = list(range(self.num_rows - 1, -1, -1))
        self._row_of: OrderedDict[bytes, int] = OrderedDict()  # used least recently first
        self._saving: dict[int, bytes] = {}
        self._awaited: dict[int, bytes] = {}  # by requests that no plan has introduced yet

    def forget(self) -> None:
        """Nothing that is saved is found any longer, but what requests are about to begin with."""
        awaited = set(self._awaited.values())
        for digest in [old for old in self._row_of if old not in awaited]:
            self._free.append(self._row_of.pop(digest))

    @property
    def digests(self) -> list[bytes]:
        """Of the saved states."""
        return list(self._row_of)

    def num_blocks(self, digests: Sequence[bytes]) -> int:
        """How many of these leading blocks a saved state covers at most."""
        for number in range(len(digests), 0, -1):
            if digests[number - 1] in self._row_of:
                return number
        return 0

    def use(self, request_id: int, digest: bytes) -> int:
        """The row of a saved state with which a request will begin. It stays until `used`."""
        self._row_of.move_to_end(digest)
        self._awaited[request_id] = digest
        return self._row_of[digest]

    def used(self, request_id: int) -> None:
        """The request has been introduced to the stages, or begins no more."""
        self._awaited.pop(request_id, None)

    def save(self, digest: bytes) -> int | None:
        """A row to save a state to in the step under construction; None: it is saved already, or
        requests will begin with all that could give way. `settle` ends it."""
        if digest in self._row_of:
            self._row_of.move_to_end(digest)
            return None
        if digest in self._saving.values():
            return None
        if self._free:
            row = self._free.pop()
        else:
            awaited = self._awaited.values()
            oldest = next((old for old in self._row_of if old not in awaited), None)
            if oldest is None:
                self._note_gone(digest)
                return None
            row = self._row_of.pop(oldest)
            self._note_gone(oldest)
        self._saving[row] = digest
        return row

    def settle(self, row: int, is_saved: bool) -> None:
        """The step that saves to this row has been answered; nothing happens after a `reset`."""
        digest = self._saving.pop(row, None)
        if digest is None:
            return
        if is_saved:
            self._row_of[digest] = row
        else:
            self._free.append(row)
            self._note_gone(digest)

    def pop_gone(self) -> list[bytes]:
        """Digests whose states gave way or were not saved since the last call; none on the first.
        Some may be saved again."""
        gone, self._gone = self._gone or [], []
        return gone

    def _note_gone(self, digest: bytes) -> None:
        if self._gone is not None:
            self._gone.append(digest)

    def validate(self) -> None:
        """Raise AssertionError unless every row is in one place."""
        places = [*self._free, *self._row_of.values(), *self._saving]
        assert sorted(places) == list(range(self.num_rows)), "a row is lost or doubled"
