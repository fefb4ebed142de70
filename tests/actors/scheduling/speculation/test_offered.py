"""Drafts that come with a step's result are used from where they were made, while they hold."""

from __future__ import annotations

from actors.scheduling.speculation.offered import Offered


def test_drafts_follow_the_output_they_were_made_for() -> None:
    offered = Offered(0.5)
    offered.take((4, 5, 6), [1, 2, 3])
    assert offered.draft(2) == (4, 5)
    offered.follow([1, 2, 3, 4])  # a step without drafts has drawn the first of them
    assert offered.draft(9) == (5, 6)
    offered.follow([1, 2, 3, 4, 7])
    assert offered.draft(9) == ()


def test_what_is_used_up_is_not_offered_again() -> None:
    offered = Offered(0.5)
    offered.take((4, 5), [1])
    offered.follow([1, 4, 5, 6, 7])
    assert offered.draft(9) == ()
    offered.take((), [1, 4, 5, 6, 7])
    assert offered.draft(9) == ()


def test_the_rate_is_of_guesses_whose_predecessors_were_right() -> None:
    right, wrong, first = Offered(0.5), Offered(0.5), Offered(0.5)
    for offered in (right, wrong, first):
        offered.take((1, 2, 3, 4), [])
    right.follow([1, 2, 3, 4])
    wrong.follow([9, 2, 3, 4])
    first.follow([9])
    assert right.acceptance_rate > 0.5 > wrong.acceptance_rate
    assert wrong.acceptance_rate == first.acceptance_rate
