"""What a policy reads of the step and of the requests for it."""

from __future__ import annotations

from actors.scheduling.budgets.fixed import FixedBudget
from tests.actors.scheduling.bench import Bench


def test_what_the_budget_leaves_is_never_negative() -> None:
    bench = Bench(FixedBudget(3), max_step_tokens=8)
    for number in range(4):
        bench.decoding(number, 4)
    step = bench.begin()
    assert step.tokens_left() == 3
    step.decode_all()
    assert (step.tokens_left(), step.token_budget, step.room_for_drafts()) == (0, 3, 0)
    large = Bench(FixedBudget(100), max_step_tokens=8)
    large.decoding(1, 4)
    large.begin().decode_all()
    assert (large.step.tokens_left(), large.step.room_for_drafts()) == (7, 7)


def test_a_step_that_is_narrowed_takes_requests_of_one_class() -> None:
    bench = Bench()
    live, background = bench.decoding(1, 4), bench.decoding(2, 4, priority=-1)
    step = bench.begin()
    assert step.are_mixed
    step.narrow(is_background=False)
    assert step.runnable_decodes() == [live]
    assert step.decoding == [live, background]
    step.decode_all()
    assert bench.ids() == [1]
    step.narrow(is_background=True)
    assert step.runnable_decodes() == [background]
    step.decode_all(most=0)
    assert bench.ids() == [1]
    step.narrow(None)
    step.decode_all()
    assert bench.ids() == [1, 2]
    assert bench.begin().runnable_decodes() == []  # both are in flight


def test_a_prompt_lacks_a_place_where_no_step_in_flight_frees_one() -> None:
    full = Bench(max_requests=1)
    running, head = full.decoding(1, 4), full.waiting(2, 4)
    assert full.begin().head() is head
    assert full.step.lacks_place(head)
    running.in_flight = 1
    full.requests.end(running)
    assert not full.step.lacks_place(head)
    short = Bench(num_blocks=4)
    short.decoding(1, 8)
    large, small = short.waiting(2, 9), short.waiting(3, 8)
    assert [short.begin().lacks_place(state) for state in (large, small)] == [True, False]
