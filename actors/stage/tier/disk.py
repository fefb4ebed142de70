"""Blocks of KV on disk, one file each, within a bound; what is not whole and right is not there.

A file is written under another name and renamed, so that none is seen half written. It carries
what it is (key and digest) and a checksum: one that was cut, damaged or put here from elsewhere is
deleted and counts as absent. Nothing is synced: a power failure costs files, never a wrong byte.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import struct
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Collection, Iterable
from itertools import islice
from pathlib import Path

logger = logging.getLogger("legato.tier")

_HEADER = struct.Struct("<8s32s16sI")  # magic, key, digest, checksum of the payload
_MAGIC = b"legatokv"
_SUFFIX, _PART = ".kv", ".part"
_PAGE = 4096  # a file takes whole ones
_MOST_SLOTS = 64  # engines of one key on one machine
_MOST_FAILURES = 8  # writes in a row, after which there is no point in more


class DiskTier:
    """The blocks of one rank: at most `max_bytes` of files in a folder that it alone uses.

    most, file_bytes: of files, and what one takes; content_bytes: what is written in it.

    Engines of the same key take numbered folders beside each other, each the first that is free,
    so that one which starts again finds its own. `put`, `get` and `held` may be called from several
    threads. Only its user may enter the folder: blocks tell of prompts, and are believed. Raises
    OSError where there can be no such folder.
    """

    def __init__(self, folder: Path, key: str, block_bytes: int, max_bytes: int) -> None:
        self._key = hashlib.sha256(key.encode()).digest()
        self.content_bytes = _HEADER.size + block_bytes
        self.file_bytes = -(-self.content_bytes // _PAGE) * _PAGE
        self.most = max_bytes // self.file_bytes
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, None] = OrderedDict()  # the longest unused first
        self._lost: list[bytes] = []  # since the last `pop_lost`
        self._num_failures = 0
        self.folder = self._lock_folder(folder)
        self._scan()

    def _lock_folder(self, folder: Path) -> Path:
        for slot in range(_MOST_SLOTS):
            own = folder / str(slot)
            with contextlib.suppress(FileNotFoundError):  # deleted by another engine meanwhile
                if self._lock_one(own):
                    return own
        raise OSError(f"{folder}: all {_MOST_SLOTS} folders are in use")

    def _lock_one(self, own: Path) -> bool:
        own.mkdir(parents=True, exist_ok=True)
        own.chmod(0o700)  # fails where another user owns it
        claim = os.open(own / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(claim), (own / "lock").stat()):
                self._claim = claim
                return True
        except BlockingIOError:
            pass
        except OSError:
            os.close(claim)
            raise
        os.close(claim)
        return False

    def _scan(self) -> None:
        """Find blocks left by an earlier engine, oldest first; contents are checked when read."""
        found: list[tuple[int, bytes]] = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.endswith(_PART):
                    _delete(Path(entry.path))
                elif entry.name.endswith(_SUFFIX):
                    status = entry.stat()
                    digest = _digest_of(entry.name)
                    if digest is None or status.st_size != self.content_bytes:
                        _delete(Path(entry.path))
                    else:
                        found.append((status.st_mtime_ns, digest))
        self._known.update((digest, None) for _, digest in sorted(found))
        self._make_room(0)
        self._lost.clear()

    # ---- blocks ---------------------------------------------------------------------------------

    def held(self) -> list[bytes]:
        """Digests of all blocks, the longest unused first."""
        with self._lock:
            return list(self._known)

    def __contains__(self, digest: bytes) -> bool:
        with self._lock:
            return digest in self._known

    def put(self, digest: bytes, block: bytes | bytearray, spared: Collection[bytes] = ()) -> bool:
        """Write one block, at the cost of the longest unused that is none of `spared`; False if it
        could not be."""
        if self.most < 1 or self._num_failures >= _MOST_FAILURES:
            return False
        header = _HEADER.pack(_MAGIC, self._key, digest, zlib.crc32(block))
        path = self.path(digest)
        part = path.with_suffix(_PART)
        if not self._make_room(1, spared):
            return False
        try:
            with part.open("wb", buffering=0) as file:
                if os.writev(file.fileno(), (header, block)) != self.content_bytes:
                    raise OSError(f"{part}: written in part")
            part.replace(path)
        except OSError as error:
            self._num_failures += 1
            off = " (the last try)" if self._num_failures == _MOST_FAILURES else ""
            logger.warning("KV is not kept on disk%s: %s", off, error)
            _delete(part)
            return False
        self._num_failures = 0
        self._add(digest)
        return True

    def _add(self, digest: bytes) -> None:
        with self._lock:
            self._known[digest] = None
            self._known.move_to_end(digest)

    def get(self, digest: bytes) -> bytearray | None:
        """One block, or None if it is absent, corrupt or, for now, not to be read."""
        if digest not in self:
            return None
        path = self.path(digest)
        try:
            content = self._read(path)
        except FileNotFoundError:
            with self._lock:
                self._forget(digest)
            return None
        except OSError as error:  # it says nothing of the content: too many files may be open
            logger.warning("%s cannot be read: %s", path, error)
            return None
        block = self.checked(digest, content)
        if block is None:
            logger.warning("%s is not what was written: deleted", path)
            with self._lock:
                self._forget(digest)
            _delete(path)
            return None
        return block

    def _read(self, path: Path) -> bytearray:
        content = bytearray(self.content_bytes + 1)  # room to see that a file is too long
        with path.open("rb", buffering=0) as file:
            del content[file.readinto(content) or 0 :]
        return content

    def used(self, digests: Iterable[bytes]) -> None:
        """These have been of use, the last of them most recently."""
        for digest in digests:
            self._renew(digest)
            with contextlib.suppress(OSError):  # tells the next engine
                now_ns = time.time_ns()
                os.utime(self.path(digest), ns=(now_ns, now_ns))

    def _renew(self, digest: bytes) -> bool:
        """Whether it is here; it counts as used then."""
        with self._lock:
            if digest in self._known:
                self._known.move_to_end(digest)
                return True
        return False

    def pop_lost(self) -> list[bytes]:
        """Blocks that have gone since the last call."""
        with self._lock:
            lost, self._lost = self._lost, []
        return lost

    def clear(self) -> None:
        """Delete all blocks."""
        self._make_room(self.most)

    def close(self) -> None:
        """Leave the folder to the next engine."""
        os.close(self._claim)

    def path(self, digest: bytes) -> Path:
        """Where the block's file is, if there is one."""
        return self.folder / (digest.hex() + _SUFFIX)

    def checked(self, digest: bytes, content: bytearray) -> bytearray | None:
        """The block in a file's content; None unless it is this one, whole and right."""
        if len(content) != self.content_bytes:
            return None
        magic, key, named, checksum = _HEADER.unpack_from(content)
        if (magic, key, named) != (_MAGIC, self._key, digest):
            return None
        block = content[_HEADER.size :]
        return block if zlib.crc32(block) == checksum else None

    def _make_room(self, num_blocks: int, spared: Collection[bytes] = ()) -> bool:
        """Whether there is room for so many more now, none of `spared` having been deleted."""
        gone: list[bytes] = []
        with self._lock:
            num_over = len(self._known) + num_blocks - self.most
            if num_over > 0:
                may_go = (digest for digest in self._known if digest not in spared)
                gone.extend(islice(may_go, num_over))
            for digest in gone:
                self._forget(digest)
        for digest in gone:  # without the lock: no question waits for a disk
            _delete(self.path(digest))
        return len(gone) >= num_over

    def _forget(self, digest: bytes) -> None:
        if digest in self._known:
            del self._known[digest]
            self._lost.append(digest)


def _digest_of(name: str) -> bytes | None:
    with contextlib.suppress(ValueError):
        digest = bytes.fromhex(name.removesuffix(_SUFFIX))
        return digest if len(digest) == 16 else None
    return None


def _delete(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
