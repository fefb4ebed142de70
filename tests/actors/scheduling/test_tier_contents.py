"""What the second tier holds counts where every rank has it."""

from __future__ import annotations

from actors.scheduling.tier_contents import TierContents


def test_a_block_is_held_where_every_rank_stores_it() -> None:
    contents = TierContents(2)
    assert contents.is_empty
    contents.replace([[b"a", b"b"], [b"b", b"c"]])
    assert [contents.holds(d) for d in (b"a", b"b", b"c", b"d")] == [False, True, False, False]
    assert contents.num_held == 1
    contents.change(1, [b"a", b"b"], [b"c"])
    assert contents.holds(b"a")
    assert contents.num_held == 2
    contents.change(0, [], [b"a", b"b"])
    assert not contents.holds(b"b")
    assert contents.num_held == 0
    assert not contents.is_empty, "one rank still stores them"
    contents.change(1, [], [b"a", b"b"])
    assert contents.is_empty


def test_a_list_replaces_what_was_known() -> None:
    contents = TierContents(1)
    contents.replace([[b"a"]])
    contents.replace([[b"b"]])
    assert [contents.holds(d) for d in (b"a", b"b")] == [False, True]
    assert contents.num_held == 1
