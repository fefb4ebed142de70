"""Engines of a node read each other's blocks, within their own bounds, whoever dies meanwhile."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from actors.stage.tier.shared import SharedTier
from actors.stage.tier.store import BlockStore
from actors.transport.shares import remove_unheld

SIZE = 1000
PAGE = 4096  # the least that a file takes

# Writes block after block, until it is killed.
WRITER = """
import sys
from pathlib import Path
from actors.stage.tier.shared import SharedTier
tier = SharedTier(Path(sys.argv[1]), "model", 1000, 1 << 30)
number = 0
while True:
    tier.put(number.to_bytes(16, "big"), bytes((number + i) % 251 for i in range(1000)))
    number += 1
    if number == int(sys.argv[2]):
        print("many", flush=True)
"""


def digest(number: int) -> bytes:
    return number.to_bytes(16, "big")


def block(number: int) -> bytearray:
    return bytearray((number + i) % 251 for i in range(SIZE))


MakeTier = Callable[..., SharedTier]


@pytest.fixture
def make_tier(tmp_path: Path) -> Iterator[MakeTier]:
    made: list[SharedTier] = []

    def make(num_blocks: int = 100, key: str = "model") -> SharedTier:
        made.append(SharedTier(tmp_path / "m/rank", key, SIZE, num_blocks * PAGE))
        return made[-1]

    yield make
    for tier in made:
        tier.close()


def test_a_block_of_a_peer_is_taken_over_without_a_copy(make_tier: MakeTier) -> None:
    one, other = make_tier(), make_tier()
    assert one.folder != other.folder
    one.put(digest(1), block(1))
    assert not other.find(digest(2))
    assert digest(1) not in other
    assert other.find(digest(1))
    assert other.held() == [digest(1)]
    assert other.get(digest(1)) == block(1)
    (mine,), (theirs,) = (list(tier.folder.glob("*.kv")) for tier in (one, other))
    assert mine.samefile(theirs)
    mine.unlink()  # the peer forgets it
    assert other.get(digest(1)) == block(1)


def test_every_share_has_its_bound(make_tier: MakeTier) -> None:
    one, other = make_tier(10), make_tier(3)
    for number in range(12):
        one.put(digest(number), block(number))
    assert len(list(one.folder.glob("*"))) == 10 + len(["lock"])
    found = [number for number in range(12) if other.find(digest(number))]
    assert found == list(range(2, 12))
    assert other.held() == [digest(n) for n in (9, 10, 11)]
    assert len(list(other.folder.glob("*.kv"))) == 3
    assert other.pop_lost() == [digest(n) for n in range(2, 9)]


@pytest.mark.parametrize("harm", ["cut", "changed", "of another model"])
def test_a_damaged_block_of_a_peer_counts_as_absent(make_tier: MakeTier, harm: str) -> None:
    one, other = make_tier(key="other" if harm == "of another model" else "model"), make_tier()
    one.put(digest(1), block(1))
    (path,) = one.folder.glob("*.kv")
    content = path.read_bytes()
    if harm == "cut":
        path.write_bytes(content[:-1])
    elif harm == "changed":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert other.find(digest(1))
    assert other.get(digest(1)) is None
    assert other.held() == []


@pytest.mark.parametrize("num_before", [1, 7, 40])
def test_a_peer_killed_while_it_writes_leaves_whole_blocks_or_none(
    make_tier: MakeTier, tmp_path: Path, num_before: int
) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path / "m/rank"), str(num_before)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"many\n"
        process = psutil.Process(writer.pid)
        writer.kill()
    left = {path.stem for path in tmp_path.rglob("*.kv")}
    reader = make_tier(100_000)
    numbers = [n for n in range(len(left) + 2) if reader.find(digest(n))]
    assert numbers == list(range(len(left)))
    assert len(left) >= num_before
    assert all(reader.get(digest(n)) == block(n) for n in numbers)
    remove_unheld(tmp_path, after=[process])
    assert {path.parent for path in tmp_path.rglob("*.*")} == {reader.folder}
    assert reader.get(digest(0)) == block(0)


def test_what_is_saved_is_there_for_peers_at_once(make_tier: MakeTier) -> None:
    one = BlockStore(SIZE, 0, shared=make_tier())
    other = BlockStore(SIZE, 2 * SIZE, shared=make_tier())
    for number in (2, 1):
        one.save(digest(number), block(number))
    assert one.pop_changes() == ([digest(1), digest(2)], [])
    assert list(other.load([digest(1), digest(2), digest(3)], 30.0)) == [block(1), block(2)]
    assert other.pop_changes() == ([digest(1), digest(2)], [])


def test_what_has_gone_from_a_share_is_told(make_tier: MakeTier) -> None:
    store = BlockStore(SIZE, 0, shared=make_tier(2))
    for number in range(3):
        store.save(digest(number), block(number))
    assert store.pop_changes() == ([digest(1), digest(2)], [])
    store.save(digest(4), block(4))
    assert store.pop_changes() == ([digest(4)], [digest(1)])


def test_a_share_that_is_deleted_before_it_is_locked_is_not_taken(
    make_tier: MakeTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, deleted = fcntl.flock, list[Path]()

    def flock(claim: int, how: int) -> None:
        if not deleted:  # an engine that starts takes it for one of a dead engine
            deleted.append(tmp_path / "m/rank/0")
            shutil.rmtree(deleted[0])
        real(claim, how)

    monkeypatch.setattr("fcntl.flock", flock)
    tier = make_tier()
    assert tier.folder == tmp_path / "m/rank/1"
    assert tier.put(digest(1), block(1))
    assert (tier.folder / "lock").exists()


def test_little_room_is_left_to_others(
    make_tier: MakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_tier()
    assert tier.put(digest(1), block(1))
    monkeypatch.setattr("actors.stage.tier.shared.LEAST_FREE_BYTES", 1 << 62)
    assert not tier.put(digest(2), block(2))
    monkeypatch.undo()
    assert tier.put(digest(2), block(2))  # it was no failure
    assert tier.get(digest(1)) == block(1)


def test_a_tail_that_is_taken_over_costs_no_head(make_tier: MakeTier) -> None:
    own, peer = make_tier(16), make_tier()
    head, others, tail = range(8), range(100, 108), range(8, 16)
    for number in (*head, *others):  # the share is full, the head the longest unused
        assert own.put(digest(number), block(number))
    for number in tail:
        peer.put(digest(number), block(number))
    store = BlockStore(SIZE, 0, shared=own)
    chain = [digest(number) for number in range(16)]
    assert list(store.load(chain, 30.0)) == [block(number) for number in range(16)]
    assert sorted(own.held()) == chain


def test_a_chain_longer_than_a_share_costs_none_of_its_own_blocks(make_tier: MakeTier) -> None:
    own, peer = make_tier(8), make_tier()
    for number in range(12):
        peer.put(digest(number), block(number))
    store = BlockStore(SIZE, 0, shared=own)
    chain = [digest(number) for number in range(12)]
    for _ in range(2):
        assert list(store.load(chain, 30.0)) == [block(number) for number in range(12)]
        assert sorted(own.held()) == chain[:8]
    assert len(list(own.folder.glob("*.kv"))) == 8
