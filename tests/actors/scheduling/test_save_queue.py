"""What is to be saved: in order, once, and counted until it is saved or given up."""

from __future__ import annotations

from actors.scheduling.save_queue import SaveQueue


def test_blocks_are_taken_in_order_and_settle_with_their_saves() -> None:
    queue = SaveQueue()
    queue.add([b"a", b"b", b"a", b"c"], 9)
    assert (queue.num_queued, queue.num_unsaved, queue.num_settled) == (3, 3, 0)
    assert queue.take(lambda digests: [digests[0][0]], 2) == [(97, b"a"), (98, b"b")]
    queue.saving[7] = 2
    assert (queue.num_unsaved, queue.num_saving, queue.num_settled) == (1, 2, 0)
    del queue.saving[7]
    assert queue.num_settled == 2
    assert queue.take(lambda digests: [], 2) == [], "it has been evicted"
    assert queue.num_settled == queue.num_queued == 3


def test_the_oldest_are_given_up() -> None:
    queue = SaveQueue()
    queue.add([b"a", b"b", b"c"], 2)
    assert (queue.num_queued, queue.num_settled) == (3, 1)
    assert [d for _, d in queue.take(lambda digests: [1], 9)] == [b"b", b"c"]
    queue.add([b"d"], 2)
    queue.saving[1] = 2
    queue.clear()
    assert queue.num_settled == queue.num_queued == 4


def test_a_peer_waits_for_what_is_complete_by_then() -> None:
    queue = SaveQueue()
    queue.add([b"a"], 9)
    assert not queue.is_awaited
    queue.hurry()
    queue.add([b"b"], 9)
    queue.add([b"c"], 9)  # nobody waits for it
    queue.take(lambda digests: [1], 1)
    assert queue.is_awaited
    queue.take(lambda digests: [1], 1)
    assert not queue.is_awaited
    queue.hurry()
    queue.add([], 9)
    assert queue.is_awaited
    queue.clear()
    assert not queue.is_awaited
