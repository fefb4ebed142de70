"""Files on disk: kept apart by key, bounded, and gone with the process."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

from app.api.batches.files import UPLOADED, FileStore, StoredFile
from app.api.batches.limits import BatchLimits
from app.api.http.errors import ApiError


async def kept(store: FileStore, owner: str, content: bytes) -> StoredFile:
    new = store.begin(owner)
    await new.write(content)
    return new.keep("in.jsonl", UPLOADED)


async def test_a_file_is_seen_by_its_key_alone(tmp_path: Path) -> None:
    store = FileStore(tmp_path, BatchLimits(), clock=lambda: 1_700_000_000.5)
    found = await kept(store, "ann", b"abc")
    assert found.path.read_bytes() == b"abc"
    assert found.shown()["bytes"] == 3
    assert found.shown()["created_at"] == 1_700_000_000
    assert store.get("ann", found.id) is found
    for call in (store.get, store.delete):
        with pytest.raises(ApiError) as caught:
            call("bob", found.id)
        assert caught.value.status == 404
    assert (store.all_of("ann"), store.all_of("bob")) == ([found], [])
    store.delete("ann", found.id)
    assert not found.path.exists()
    store.close()


async def test_what_is_written_and_what_is_kept_counts(tmp_path: Path) -> None:
    store = FileStore(tmp_path, BatchLimits(max_files=2, max_bytes=10))
    first = store.begin("ann")
    await first.write(b"12345")
    assert not first.has_room(6)
    second = store.begin("ann")
    assert second.has_room(5)
    with pytest.raises(ApiError, match="max_files_per_key"):
        store.check_upload("ann")
    store.check_upload("bob")
    second.discard()
    store.check_upload("ann")
    file = first.keep("a", UPLOADED)
    store.delete("ann", file.id)
    assert store.num_files("ann") == 0
    assert store.begin("ann").has_room(10)
    store.close()


async def test_a_file_that_is_read_stays(tmp_path: Path) -> None:
    store = FileStore(tmp_path, BatchLimits())
    found = await kept(store, "ann", b"abc")
    found.num_readers += 1
    with pytest.raises(ApiError, match="cancel it first"):
        store.delete("ann", found.id)
    found.num_readers -= 1
    store.delete("ann", found.id)
    store.close()


def _die_with_files(folder: Path) -> None:
    FileStore(folder, BatchLimits()).begin("ann")
    os._exit(9)


def test_the_next_process_removes_what_a_killed_one_has_left(tmp_path: Path) -> None:
    living = FileStore(tmp_path, BatchLimits())
    own = set(tmp_path.glob("server-*"))
    (tmp_path / "server-of-mine").mkdir()
    (tmp_path / "other").mkdir()
    killed = multiprocessing.get_context("spawn").Process(target=_die_with_files, args=(tmp_path,))
    killed.start()
    killed.join()
    left = set(tmp_path.glob("server-*")) - own - {tmp_path / "server-of-mine"}
    assert len(left) == 1
    assert (next(iter(left)).stat().st_mode & 0o777) == 0o700
    FileStore(tmp_path, BatchLimits()).close()
    assert set(tmp_path.glob("server-*")) == own | {tmp_path / "server-of-mine"}
    living.close()
    assert {path.name for path in tmp_path.iterdir()} == {
        ".legato-batches",
        "other",
        "server-of-mine",
    }
