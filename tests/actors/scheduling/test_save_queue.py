"""What is to be saved: in order, once, and counted until it is saved or given up."""

from __future__ import annotations

from actors.scheduling.save_queue import SaveQueue


def take(queue: SaveQueue, move_id: int, most: int = 9) -> list[bytes]:
    found = queue.take(move_id, lambda digests: [digests[0][0]], most)
    assert [block for block, _ in found] == [digest[0] for _, digest in found]
    return [digest for _, digest in found]


def test_blocks_are_taken_in_order_and_settle_with_their_saves() -> None:
    queue = SaveQueue()
    queue.add([b"a", b"b", b"a", b"c"], 9)
    assert (queue.num_queued, queue.num_unsaved, queue.num_settled) == (3, 3, 0)
    assert take(queue, 7, most=2) == [b"a", b"b"]
    assert (queue.num_unsaved, queue.num_saving, queue.num_settled) == (1, 2, 0)
    assert [queue.is_open(digest) for digest in (b"a", b"b", b"c", b"d")] == [True] * 3 + [False]
    del queue.saving[7]
    assert queue.num_settled == 2
    assert queue.take(8, lambda digests: [], 2) == [], "it has been evicted"
    assert queue.saving == {}
    assert not queue.is_open(b"c")
    assert queue.num_settled == queue.num_queued == 3


def test_the_oldest_are_given_up() -> None:
    queue = SaveQueue()
    queue.add([b"a", b"b", b"c"], 2)
    assert (queue.num_queued, queue.num_settled) == (3, 1)
    assert take(queue, 1) == [b"b", b"c"]
    queue.add([b"d"], 2)
    queue.clear()
    assert queue.num_settled == queue.num_queued == 4


def test_a_peer_waits_for_what_is_complete_by_then() -> None:
    queue = SaveQueue()
    queue.add([b"a"], 9)
    assert not queue.is_awaited
    queue.hurry()
    queue.add([b"b"], 9)
    queue.add([b"c"], 9)  # nobody waits for it
    take(queue, 1, most=1)
    assert queue.is_awaited
    take(queue, 2, most=1)
    assert not queue.is_awaited
    queue.hurry()
    queue.add([], 9)
    assert queue.is_awaited
    queue.clear()
    assert not queue.is_awaited


def test_what_goes_first_goes_alone_and_the_others_count_as_before() -> None:
    queue = SaveQueue()
    queue.hurry()
    queue.add([b"a", b"b", b"c", b"d"], 9)
    queue.hurry((b"c", b"e", b"x"))  # the last is saved already
    queue.add([b"e"], 9)
    queue.add([b"c"], 9)
    assert queue.num_queued == 5
    assert take(queue, 1) == [b"c", b"e"], "a save is answered as a whole"
    assert queue.is_awaited
    del queue.saving[1]
    assert not queue.is_open(b"e")
    assert queue.num_settled == 0, "the first is open"
    assert take(queue, 2) == [b"a", b"b", b"d"]
    del queue.saving[2]
    assert queue.num_settled == 5


def test_only_those_that_go_first_are_hurried() -> None:
    queue = SaveQueue()
    queue.hurry((b"b",))
    queue.add([b"a", b"b"], 9)
    assert queue.is_awaited
    assert take(queue, 1) == [b"b"]
    assert not queue.is_awaited
