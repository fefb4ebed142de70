"""Swapping: when it pays, what the next plan copies, and what owns a host block meanwhile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from actors.scheduling.memory.swap import Swapper
from actors.scheduling.plan import StepShape
from actors.scheduling.state import RequestState, RequestStatus
from tests.actors.scheduling.short_lives import config, request

BLOCK_SIZE, NUM_HOST_BLOCKS = 4, 6


class Costs:
    """A token takes a second to compute, a block `block_s` to move one way."""

    def __init__(self, block_s: float) -> None:
        self.block_s = block_s

    def step_s(self, shape: StepShape) -> float:
        return float(shape.num_tokens)

    latency_s = step_s

    def swap_s(self, num_blocks: int) -> float:
        return num_blocks * self.block_s

    def observe(self, shape: StepShape, duration_s: float) -> None:
        """Learns nothing."""


def swapper(block_s: float | None = None, **changes: Any) -> Swapper:
    settings = config(num_host_blocks=NUM_HOST_BLOCKS, block_size=BLOCK_SIZE, **changes)
    return Swapper(settings, None if block_s is None else Costs(block_s))


def holding(num_computed_tokens: int, number: int = 1, pooling: str | None = None) -> RequestState:
    asked = replace(request(number, prompt=30), pooling=pooling)
    state = RequestState(asked, number, max_model_len=64)
    state.num_computed_tokens = num_computed_tokens
    first = 100 * number
    state.block_table = [first + i for i in range(8)]  # of its whole prompt
    return state


@pytest.mark.parametrize(
    ("num_tokens", "block_s", "pays"),
    [
        (9, 1.49, True),  # three blocks there and back in less than nine seconds
        (9, 1.51, False),
        (12, 1.99, True),
        (0, 0.0, False),  # nothing is computed
        (24, 0.0, True),
        (25, 0.0, False),  # seven blocks
    ],
)
def test_it_pays_where_moving_twice_is_faster(num_tokens: int, block_s: float, pays: bool) -> None:
    assert swapper(block_s).pays(holding(num_tokens)) is pays


def test_a_mean_needs_every_token_again() -> None:
    """Stages drop the sum of its hidden states at a preemption."""
    assert not swapper(swap="always").pays(holding(9, pooling="mean"))
    assert swapper(swap="always").pays(holding(9, pooling="last"))


def test_a_choice_that_is_set_overrides_the_costs() -> None:
    assert swapper(1e9, swap="always").pays(holding(9))
    assert not swapper(0.0, swap="never").pays(holding(9))
    assert not swapper(None).pays(holding(9))  # without a cost model
    assert swapper(None, swap="always").pays(holding(9))
    assert not swapper(None, swap="always").pays(holding(25))


def test_what_goes_out_comes_back_in_the_same_order() -> None:
    swap, state = swapper(), holding(9)
    swap.move_out(state)
    assert (swap.is_pending, swap.num_swaps, swap.host.num_free) == (True, 1, 3)
    assert [device for device, _ in swap.swap_out] == [100, 101, 102]
    assert [host for _, host in swap.swap_out] == state.host_blocks
    assert swap.swapped_out == [state]
    hosts = list(state.host_blocks)
    swap.clear()
    assert (swap.is_pending, swap.swap_out) == (False, [])
    state.block_table = [7, 8, 9, 10]
    swap.move_in(state)
    assert swap.swap_in == list(zip(hosts, [7, 8, 9], strict=True))
    # The plan reads them: they are free only once it is answered.
    assert (state.host_blocks, swap.returned, swap.host.num_free) == ([], hosts, 3)


def test_copies_of_several_requests_are_in_one_plan() -> None:
    swap, first, second, third = swapper(), holding(8), holding(4, 2), holding(16, 3)
    swap.move_out(first)
    swap.move_out(second)
    assert not swap.pays(third)
    assert [device for device, _ in swap.swap_out] == [100, 101, 200]
    assert not {*first.host_blocks} & {*second.host_blocks}
    swap.host.validate([*first.host_blocks, *second.host_blocks])
    swap.drop(first)
    assert (first.host_blocks, swap.host.num_free) == ([], 5)
    swap.host.validate(second.host_blocks)


@pytest.mark.parametrize(
    ("status", "num_left"), [(RequestStatus.WAITING, 0), (RequestStatus.RUNNING, 9)]
)
def test_distrusted_kv_is_computed_again(status: RequestStatus, num_left: int) -> None:
    """That of a running request is on the device, and is another's concern."""
    swap, state = swapper(), holding(9)
    swap.move_out(state)
    state.status = status
    swap.distrust(state)
    assert state.num_computed_tokens == num_left
    assert swap.host.num_free == (NUM_HOST_BLOCKS if num_left == 0 else 3)
    untouched = holding(9)
    swap.distrust(untouched)
    assert untouched.num_computed_tokens == 9
