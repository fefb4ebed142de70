"""The files of batches: on disk while this process runs, each visible to the key that made it.

A folder belongs to one process, which removes it at its end. What a killed process has left is
removed by the next one that opens a folder beside it.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from app.api.batches.limits import BatchLimits
from app.api.http.errors import ApiError, invalid

_LOCK: Final = ".legato-batches"
_PREFIX: Final = "server-"
UPLOADED: Final = "batch"
WRITTEN: Final = "batch_output"  # purposes, as OpenAI names them


@dataclass(slots=True, eq=False)
class StoredFile:
    """num_readers: unfinished batches that read it."""

    id: str
    filename: str
    purpose: str
    created_s: int
    num_bytes: int
    path: Path
    num_readers: int = 0

    def shown(self) -> dict[str, Any]:
        """OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_s,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "expires_at": None,
            "status_details": None,
        }


class _Shelf:
    """The files of one key. num_bytes, num_files: those being written included."""

    __slots__ = ("files", "num_bytes", "num_files")

    def __init__(self) -> None:
        self.files: dict[str, StoredFile] = {}
        self.num_bytes = 0
        self.num_files = 0


class FileStore:
    """Files by key. Runs on the event loop; the disk is written and read beside it."""

    def __init__(
        self, folder: Path, limits: BatchLimits, clock: Callable[[], float] = time.time
    ) -> None:
        """Opens a folder within `folder`; raises OSError if it cannot."""
        self.limits = limits
        self._clock = clock
        self._folder, self._claim = _own_folder(folder)
        self._shelves: dict[str, _Shelf] = {}

    def _shelf(self, owner: str) -> _Shelf:
        return self._shelves.setdefault(owner, _Shelf())

    def num_files(self, owner: str) -> int:
        """Files of this key, those being written included."""
        return self._shelf(owner).num_files

    def begin(self, owner: str) -> NewFile:
        """A new file."""
        shelf = self._shelf(owner)
        new = NewFile(self, shelf, self._folder / f"file-{secrets.token_hex(12)}")
        shelf.num_files += 1
        return new

    def check_upload(self, owner: str) -> None:
        """Raises 400 if this key may keep no more files."""
        if self.num_files(owner) >= self.limits.max_files:
            raise invalid(
                f"{self.limits.max_files} files are kept: delete some first (setting "
                "batches.max_files_per_key).",
                code="too_many_files",
            )

    def get(self, owner: str, file_id: str, param: str = "file_id") -> StoredFile:
        """Raises 404."""
        found = self._shelf(owner).files.get(file_id)
        if found is None:
            raise ApiError(404, f"No such file: {file_id[:100]}.", param)
        return found

    def all_of(self, owner: str) -> list[StoredFile]:
        """In the order in which they were complete."""
        return list(self._shelf(owner).files.values())

    def delete(self, owner: str, file_id: str) -> None:
        """Raises 404 if there is none, 400 if a batch reads it."""
        found = self.get(owner, file_id)
        if found.num_readers:
            raise invalid(
                "A batch that is not finished reads this file: cancel it first.", "file_id"
            )
        shelf = self._shelf(owner)
        del shelf.files[file_id]
        shelf.num_files -= 1
        shelf.num_bytes -= found.num_bytes
        found.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove every file."""
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._claim)

    def _now_s(self) -> int:
        return int(self._clock())


class NewFile:
    """A file being written, which counts for its key's limits. Ends by `keep` or `discard`."""

    def __init__(self, store: FileStore, shelf: _Shelf, path: Path) -> None:
        self._store = store
        self._shelf = shelf
        self._path = path
        self._file = path.open("xb")
        self.num_bytes = 0

    def has_room(self, num_bytes: int) -> bool:
        """Whether this key may keep so much more."""
        return self._shelf.num_bytes + num_bytes <= self._store.limits.max_bytes

    async def write(self, data: bytes) -> None:
        """Add to the file; raises OSError. Nothing is checked here."""
        self.num_bytes += len(data)
        self._shelf.num_bytes += len(data)
        await asyncio.to_thread(self._file.write, data)

    def keep(self, filename: str, purpose: str) -> StoredFile:
        """It is complete. Raises OSError, and is then to be discarded."""
        self._file.close()
        num_bytes = self._path.stat().st_size  # less, where a write was cancelled
        self._shelf.num_bytes += num_bytes - self.num_bytes
        created_s = self._store._now_s()
        name = self._path.name
        found = StoredFile(name, filename, purpose, created_s, num_bytes, self._path)
        self._shelf.files[name] = found
        return found

    def discard(self) -> None:
        """It will not be kept."""
        self._shelf.num_files -= 1
        self._shelf.num_bytes -= self.num_bytes
        self._path.unlink(missing_ok=True)
        with suppress(OSError):  # what is buffered may find no room, and need not
            self._file.close()


def _own_folder(parent: Path) -> tuple[Path, int]:
    """A new folder that its user alone may enter, and the open file by which it is claimed."""
    parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _locked(parent / _LOCK):  # so that no folder is seen before it is claimed
        for other in parent.glob(f"{_PREFIX}*"):
            if _is_abandoned(other):
                shutil.rmtree(other, ignore_errors=True)
        own = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        claim = os.open(own / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(claim, fcntl.LOCK_EX)
    return own, claim


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _is_abandoned(folder: Path) -> bool:
    """Whether no process claims it. A folder without a lock file is left alone."""
    try:
        file = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(file)
    return True
