"""Paged memory and its cache, against a plain model of both."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.scheduling.memory.block_manager import BlockManager, HostPool
from actors.scheduling.state import prefix_digests
from tests.actors.scheduling.driver import is_shared


def name(number: int) -> bytes:
    return number.to_bytes(2, "big")


@given(st.integers(1, 12), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 40)), max_size=80))
def test_blocks_are_conserved_and_content_is_found(
    num_blocks: int, script: list[tuple[int, int]]
) -> None:
    manager = BlockManager(num_blocks)
    tables: list[list[int]] = []  # what callers hold
    content: dict[bytes, int] = {}  # digest -> block that was committed under it
    for action, argument in script:
        if action == 0:
            count = argument % 4
            if manager.can_allocate(count):
                tables.append(manager.allocate(count))
            else:
                with pytest.raises(MemoryError):
                    manager.allocate(count)
        elif action == 1 and tables:
            version = manager.version
            manager.free(tables.pop(argument % len(tables)))
            assert manager.version > version
        elif action == 2 and tables:
            table = tables[argument % len(tables)]
            for block in table:
                if not is_shared(manager, block):
                    digest = name(argument)
                    if digest not in content or manager.match([digest]) == []:
                        content[digest] = block
                        manager.commit(block, digest)
                        assert is_shared(manager, block)
                        break
        elif action == 3:
            found = manager.match([name(argument)])
            assert found in ([], [content.get(name(argument))])
            if found:
                manager.share(found)
                tables.append(found)
        elif action == 4 and tables:
            table = tables[argument % len(tables)]
            manager.share(table)
            tables.append(list(table))
        references = Counter(block for table in tables for block in table)
        manager.validate(references)
        assert manager.num_free == num_blocks - len(references)
    for table in tables:
        manager.free(table)
    assert manager.num_free == num_blocks


def test_the_longest_known_prefix_is_matched() -> None:
    manager = BlockManager(4)
    digests = prefix_digests(range(8), 2)
    blocks = manager.allocate(3)
    for block, digest in zip(blocks, digests, strict=False):
        manager.commit(block, digest)
    assert manager.match(digests) == blocks
    assert manager.match([digests[0], b"other", digests[2]]) == blocks[:1]


def test_eviction_takes_the_oldest_tail_first() -> None:
    manager = BlockManager(4)
    digests = prefix_digests(range(8), 2)
    blocks = manager.allocate(4)
    for block, digest in zip(blocks, digests, strict=True):
        manager.commit(block, digest)
    manager.free(blocks)
    assert manager.num_free == manager.num_cached == 4
    taken = manager.allocate(2)
    assert taken == [blocks[3], blocks[2]]
    assert manager.match(digests) == blocks[:2]
    assert manager.num_evictions == 2


def test_a_second_block_of_the_same_content_stays_private() -> None:
    manager = BlockManager(2)
    first, second = manager.allocate(2)
    manager.commit(first, b"x")
    manager.commit(second, b"x")
    assert manager.match([b"x"]) == [first]
    assert not is_shared(manager, second)


def test_a_state_that_went_and_came_is_told_again() -> None:
    """To a front that has connected in between, and heard that it is not there."""
    manager = BlockManager(2, 1)
    states = manager.states
    assert states is not None

    def save(digest: bytes) -> None:
        row = states.save(digest)
        assert row is not None
        states.settle(row, is_saved=True)

    for block, digest in zip(manager.allocate(2), (b"x", b"y"), strict=True):
        manager.commit(block, digest)
    save(b"x")
    assert manager.pop_changes() == (True, [b"x"], [])
    save(b"y")
    assert manager.findable() == [b"y"]
    save(b"x")
    assert manager.pop_changes() == (False, [b"x"], [b"y"])


def test_blocks_known_to_be_held_are_not_looked_at_again_until_some_are_let_go() -> None:
    manager, looked_at = BlockManager(8), list[int]()

    def num_held() -> int:
        looked_at.clear()

        def digest_of(index: int) -> bytes:
            looked_at.append(index)
            return name(index)

        return manager.num_held("asking", digest_of, 4, {})

    blocks = manager.allocate(3)
    for number, block in enumerate(blocks):
        manager.commit(block, name(number))
    assert (num_held(), looked_at) == (3, [0, 1, 2, 3])
    assert (num_held(), looked_at) == (3, [3])
    manager.free(manager.allocate(1))  # nothing that can be found
    assert (num_held(), looked_at) == (3, [3])
    manager.free(blocks[2:])
    assert (num_held(), looked_at) == (2, [0, 1, 2])
    manager.share(blocks[2:])
    assert (num_held(), looked_at) == (3, [2, 3])


def test_host_blocks_have_one_owner() -> None:
    pool = HostPool(3)
    held = pool.allocate(2)
    assert pool.num_free == 1
    with pytest.raises(MemoryError):
        pool.allocate(2)
    pool.validate(held)
    pool.free(held)
    pool.validate([])
