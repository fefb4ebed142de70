"""Results come in the order of the calls, whatever the number of processes."""

from __future__ import annotations

import os

import pytest

from app.simulate.run.processes import each, in_order

CALLS = [(7, 2), (3, 1), (9, 4)]


def difference(a: int, b: int) -> tuple[int, int]:
    return a - b, os.getpid()


@pytest.mark.parametrize("workers", [1, 2])
def test_results_are_in_order_and_each_is_reported_once(workers: int) -> None:
    reported: list[None] = []
    found = each(difference, CALLS, workers, lambda: reported.append(None))
    assert [result for result, _ in found] == [5, 2, 5]
    assert len(reported) == 3
    assert [result for result, _ in in_order(difference, CALLS, workers)] == [5, 2, 5]
    assert list(in_order(difference, [], workers)) == []


@pytest.mark.parametrize("find", [each, in_order])
def test_several_workers_are_other_processes(find: object) -> None:
    assert callable(find)
    assert {pid for _, pid in find(difference, CALLS)} == {os.getpid()}
    assert os.getpid() not in {pid for _, pid in find(difference, CALLS, 2)}


def test_one_worker_computes_no_result_before_it_is_asked_for() -> None:
    """A study shows its first row while it computes the second."""
    computed: list[int] = []
    rows = in_order(computed.append, [(1,), (2,)])
    next(rows)
    assert computed == [1]
