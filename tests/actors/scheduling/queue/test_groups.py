"""Requests of one group: one computes the prompt, the others wait, whichever ends meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from actors.scheduling.plan import TokenLogprobs
from actors.scheduling.queue.groups import Groups
from actors.scheduling.state import RequestState, RequestStatus, Suspicion
from tests.actors.scheduling.short_lives import request


def member(number: int, group: str | None = "g", **changes: Any) -> RequestState:
    changes.setdefault("tokens", (1, 2, 3, 4))
    return RequestState(request(number, group=group, **changes), number, max_model_len=64)


def joined(count: int) -> tuple[Groups, list[RequestState]]:
    groups, members = Groups(), [member(number) for number in range(count)]
    assert [groups.join(state) for state in members] == [True] + [False] * (count - 1)
    return groups, members


def end(groups: Groups, state: RequestState) -> list[RequestState]:
    state.status = RequestStatus.ENDED
    return groups.ended(state)


def test_the_others_enter_once_the_prompt_is_computed() -> None:
    groups, (leader, *others) = joined(3)
    assert groups.donor(others[0]) is None
    assert groups.prompt_done(leader) == others
    assert groups.donor(others[0]) is leader
    assert groups.prompt_done(leader) == []  # computed again after a preemption
    late = member(9)
    assert groups.join(late)
    assert groups.donor(late) is leader


def test_a_request_without_a_group_waits_for_none() -> None:
    groups, alone = Groups(), member(1, group=None)
    assert groups.join(alone)
    assert groups.prompt_done(alone) == groups.ended(alone) == []
    assert groups.donor(alone) is None
    assert len(groups) == 0


def test_a_leader_that_ends_early_has_one_heir() -> None:
    groups, (leader, second, third, fourth) = joined(4)
    assert end(groups, second) == []  # aborted while it was held back
    assert end(groups, leader) == [third]
    assert groups.prompt_done(third) == [fourth]
    assert end(groups, third) == end(groups, fourth) == []
    assert len(groups) == 0


def test_a_leader_that_ends_after_its_prompt_leaves_none_behind() -> None:
    groups, (leader, second) = joined(2)
    assert groups.prompt_done(leader) == [second]
    assert end(groups, leader) == []
    assert groups.donor(second) is None
    assert groups.prompt_done(second) == []
    third = member(3)
    assert groups.join(third)
    assert groups.donor(third) is second


def test_a_member_that_has_lost_its_blocks_gives_none() -> None:
    groups, (leader, second) = joined(2)
    groups.prompt_done(leader)
    groups.prompt_done(second)
    groups.vacated(leader)
    assert groups.donor(leader) is second
    groups.vacated(leader)
    groups.vacated(second)
    assert groups.donor(leader) is None


def test_a_suspect_waits_for_its_own_trial_alone() -> None:
    groups, _ = joined(2)
    suspect = member(5)
    suspect.suspicion = Suspicion()
    assert groups.join(suspect)


@pytest.mark.parametrize(
    ("other", "shares"),
    [
        ({}, True),
        ({"tokens": (1, 2, 3, 5)}, False),
        ({"cache_salt": "another tenant"}, False),
        ({"pooling": "mean"}, False),
        ({"sampling": {"prompt_logprobs": 2}}, False),
    ],
)
def test_only_the_same_prompt_is_shared(other: dict[str, Any], shares: bool) -> None:
    groups, (leader, _) = joined(2)
    groups.prompt_done(leader)
    asking = member(7, **other)
    groups.join(asking)
    assert (groups.donor(asking) is leader) is shares
    leader.prompt_logprobs += [TokenLogprobs(2, -1.0, 1, ())] * 3  # it was asked for them too
    is_complete = shares or "sampling" in other
    assert (groups.donor(asking) is leader) is is_complete


def test_groups_do_not_mix() -> None:
    groups, _ = joined(2)
    outsider = member(8, group="h")
    assert groups.join(outsider)
    assert groups.prompt_done(outsider) == []
    assert len(groups) == 2
