"""The second tier's store: bounded, least recently used first out, and never a wrong byte."""

from __future__ import annotations

import errno
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from actors.stage.tier.disk import DiskTier
from actors.stage.tier.store import Block, BlockStore

SIZE = 1000
HEADER = 60  # magic, key, digest, checksum
PAGE = 4096  # the least that a file takes


def digest(number: int) -> bytes:
    return number.to_bytes(16, "big")


def block(number: int) -> Block:
    return bytearray((number + i) % 251 for i in range(SIZE))


MakeDisk = Callable[..., DiskTier]


@pytest.fixture
def make_disk(tmp_path: Path) -> Iterator[MakeDisk]:
    made: list[DiskTier] = []

    def make(num_blocks: int = 100, key: str = "model a") -> DiskTier:
        made.append(DiskTier(tmp_path, key, SIZE, num_blocks * PAGE))
        return made[-1]

    yield make
    for disk in made:
        try:
            disk.close()
        except OSError:
            continue  # the test has closed it


def load(store: BlockStore, *numbers: int) -> list[Block]:
    return list(store.load([digest(n) for n in numbers], 30.0))


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.kv"))


# ---- host -----------------------------------------------------------------------------------


def test_host_memory_is_bounded_and_forgets_the_longest_unused() -> None:
    store = BlockStore(SIZE, 3 * SIZE + 10)
    for number in range(3):
        store.save(digest(number), block(number))
    assert store.pop_changes() == ([digest(0), digest(1), digest(2)], [])
    assert load(store, 0) == [block(0)]  # used: now 1 is the longest unused
    store.save(digest(3), block(3))
    assert store.pop_changes() == ([digest(3)], [digest(1)])
    assert load(store, 0, 2, 3) == [block(0), block(2), block(3)]
    assert load(store, 0, 1, 2) == [block(0)], "what follows an absent block is of no use"


def test_a_block_that_came_and_went_between_two_calls_is_not_told() -> None:
    store = BlockStore(SIZE, SIZE)
    for number in range(5):
        store.save(digest(number), block(number))
    assert store.pop_changes() == ([digest(4)], [])


# ---- disk -----------------------------------------------------------------------------------


def test_a_disk_survives_its_engine(make_disk: MakeDisk) -> None:
    store = BlockStore(SIZE, 0, make_disk())
    for number in range(5):
        store.save(digest(number), block(number))
    assert store.flush(30.0)
    store.close()
    again = BlockStore(SIZE, 2 * SIZE, make_disk())
    assert again.held() == [digest(number) for number in range(5)]
    assert load(again, 3, 1, 4, 9) == [block(3), block(1), block(4)]
    assert again.pop_changes() == ([], []), "read into memory, they are held as before"
    again.close()


def test_a_disk_is_bounded_and_forgets_the_longest_unused(make_disk: MakeDisk) -> None:
    disk = make_disk(3)
    for number in range(3):
        assert disk.put(digest(number), block(number))
    disk.used([digest(0)])
    disk.put(digest(3), block(3))
    assert disk.pop_lost() == [digest(1)]
    assert disk.held() == [digest(2), digest(0), digest(3)]
    assert len(files(disk.folder)) == 3
    disk.close()
    fewer = make_disk(2)
    assert set(fewer.held()) == {digest(0), digest(3)}, "a smaller bound holds from the start"
    assert len(files(fewer.folder)) == 2


@pytest.mark.parametrize("at", [0, 10, 45, 58, HEADER, HEADER + 500, HEADER + SIZE - 1])
def test_a_flipped_byte_is_an_absent_block(make_disk: MakeDisk, at: int) -> None:
    disk = make_disk()
    for number in range(3):
        disk.put(digest(number), block(number))
    path = files(disk.folder)[1]
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    store = BlockStore(SIZE, 10 * SIZE, disk)
    assert load(store, 0, 1, 2) == [block(0)]
    assert store.pop_changes() == ([], [digest(1)])
    assert not path.exists()
    store.close()


def test_cut_and_foreign_files_are_absent(make_disk: MakeDisk, tmp_path: Path) -> None:
    disk = make_disk()
    for number in range(4):
        disk.put(digest(number), block(number))
    paths = files(disk.folder)
    paths[0].write_bytes(paths[0].read_bytes()[:-1])
    paths[2].write_bytes(paths[1].read_bytes())  # a block under another's name
    (disk.folder / "left.part").write_bytes(b"half")
    assert disk.get(digest(0)) is None
    paths[0].write_bytes(b"")
    disk.close()
    again = make_disk()
    assert set(again.held()) == {digest(1), digest(2), digest(3)}
    assert again.get(digest(2)) is None
    assert again.get(digest(1)) == block(1)
    assert not (again.folder / "left.part").exists()
    again.close()
    other = make_disk(key="model b")
    assert other.get(digest(1)) is None, "of another model"
    assert digest(1) not in other


def test_a_file_that_cannot_be_read_now_is_kept(
    make_disk: MakeDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = make_disk()
    for number in range(2):
        disk.put(digest(number), block(number))

    def fails(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "too many open files", str(path))

    monkeypatch.setattr(Path, "open", fails)
    assert disk.get(digest(0)) is None
    monkeypatch.undo()
    assert disk.get(digest(0)) == block(0)
    files(disk.folder)[1].unlink()
    assert disk.get(digest(1)) is None
    assert disk.held() == [digest(0)]
    assert disk.pop_lost() == [digest(1)], "the file has gone"


def test_two_engines_of_one_key_do_not_share_a_folder(make_disk: MakeDisk) -> None:
    first, second = make_disk(), make_disk()
    assert first.folder != second.folder
    first.put(digest(1), block(1))
    assert digest(1) not in second
    folder = first.folder
    first.close()
    third = make_disk()
    assert third.folder == folder
    assert digest(1) in third


def test_no_other_user_may_read_what_prompts_have_left(make_disk: MakeDisk) -> None:
    disk = make_disk()
    assert disk.folder.stat().st_mode & 0o077 == 0


def test_a_disk_that_cannot_be_written_is_given_up(make_disk: MakeDisk) -> None:
    disk = make_disk()
    folder = disk.folder
    moved = folder.rename(folder.with_name("moved"))
    for number in range(9):
        assert not disk.put(digest(number), block(number))
    moved.rename(folder)
    assert not disk.put(digest(9), block(9))
    assert disk.held() == []


# ---- neither waits for the other --------------------------------------------------------------


class SlowDisk:
    """Writes and reads only once it is let."""

    def __init__(self) -> None:
        self.may_write, self.may_read = threading.Event(), threading.Event()
        self.content: dict[bytes, Block] = {}

    def held(self) -> list[bytes]:
        return list(self.content)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self.content

    def put(self, digest: bytes, block: Block) -> bool:
        self.may_write.wait()
        self.content[digest] = block
        return True

    def get(self, digest: bytes) -> Block | None:
        self.may_read.wait()
        return self.content.get(digest)

    def used(self, digests: Iterable[bytes]) -> None:
        pass

    def pop_lost(self) -> list[bytes]:
        return []

    def close(self) -> None:
        self.may_write.set()


def test_saving_does_not_wait_for_the_disk() -> None:
    disk = SlowDisk()
    store = BlockStore(SIZE, 0, disk)
    for number in range(4):
        store.save(digest(number), block(number))
    assert store.pop_changes() == ([digest(n) for n in range(4)], [])
    assert load(store, 0, 3) == [block(0), block(3)], "served while it waits to be written"
    disk.may_write.set()
    assert store.flush(30.0)
    assert set(disk.content) == {digest(n) for n in range(4)}
    store.close()


def test_a_load_that_takes_too_long_ends() -> None:
    disk = SlowDisk()
    disk.content[digest(1)] = block(1)
    store = BlockStore(SIZE, 4 * SIZE, disk)
    store.save(digest(0), block(0))
    assert list(store.load([digest(0), digest(1)], 0.01)) == [block(0)]
    disk.may_read.set()
    assert load(store, 0, 1) == [block(0), block(1)]
    disk.may_write.set()  # what closing waits for
    store.close()


class Counted(bytearray):
    """A block whose end can be seen."""


class EndlessDisk(SlowDisk):
    """Has every block."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[weakref.ref[Counted]] = []

    def __contains__(self, digest: bytes) -> bool:
        return True

    def get(self, digest: bytes) -> Block | None:
        content = Counted(digest)
        self.read.append(weakref.ref(content))
        return content


def test_a_load_holds_few_blocks_at_a_time() -> None:
    disk = EndlessDisk()
    store = BlockStore(SIZE, 0, disk)
    loaded = []
    for content in store.load([digest(number) for number in range(200)], 30.0):
        loaded.append(bytes(content))
        assert sum(ref() is not None for ref in list(disk.read)) <= 10
    assert loaded == [digest(number) for number in range(200)]
    store.close()
