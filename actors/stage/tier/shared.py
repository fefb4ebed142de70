"""Blocks in shared memory that all engines of a node read: files as `disk` has them.

Every engine writes into a folder of its own, its share, within its own bound. A block of a peer is
taken over by a hard link, which copies nothing: it then counts towards the bound here, and stays
when the peer forgets it or dies. A file gets its name when it is complete and is never changed, so
a peer that is killed while it writes leaves nothing that could be read.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from actors.stage.tier.disk import DiskTier

# Of the file system: other processes' shared memory is there too, and one without room dies.
LEAST_FREE_BYTES: Final = 256 << 20


class SharedTier(DiskTier):
    """The share of one rank, in the folder where the shares of its peers are."""

    def put(self, digest: bytes, block: bytes | bytearray, spared: Collection[bytes] = ()) -> bool:
        """See `DiskTier.put`; False too while all shares together leave little room."""
        space = os.statvfs(self.folder)
        if space.f_bavail * space.f_frsize < LEAST_FREE_BYTES + len(block):
            return False
        return super().put(digest, block, spared)

    def find(self, digest: bytes, spared: Collection[bytes] = ()) -> bool:
        """Whether `get` finds it: it is here now, taken over from a peer if need be, and not the
        next to go. Where only `spared` could give way for it, it stays the peer's alone."""
        if self._renew(digest):
            return True
        own = self.path(digest)
        for share in self._shares():
            if share == self.folder:
                continue
            try:
                os.link(share / own.name, own)
            except FileExistsError:
                pass
            except OSError:  # this peer does not have it
                continue
            if not self._make_room(1, spared):
                own.unlink(missing_ok=True)
                return True
            self._add(digest)
            return True
        return False

    def get(self, digest: bytes) -> bytearray | None:
        """One block, of a peer if it is not here; or None. See `DiskTier.get`."""
        if digest in self:
            return super().get(digest)
        name = self.path(digest).name
        for share in self._shares():
            with suppress(OSError):  # this peer does not have it
                return self.checked(digest, self._read(share / name))
        return None

    def _shares(self) -> Iterator[Path]:
        """Those of dead peers too, until they are deleted."""
        with os.scandir(self.folder.parent) as entries:
            for entry in entries:
                yield Path(entry.path)
