"""Swapping of KV to host memory, where that is faster than recomputation."""

from __future__ import annotations

from collections.abc import Sequence

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.interfaces import StepTimePredictor
from actors.scheduling.memory.block_manager import HostPool
from actors.scheduling.plan import StepShape
from actors.scheduling.state import RequestState, RequestStatus


class Swapper:
    """Host blocks, and the copies of the next plan."""

    def __init__(self, config: SchedulerConfig, cost_model: StepTimePredictor | None) -> None:
        self.config = config
        self.cost_model = cost_model
        self.host = HostPool(config.num_host_blocks)
        self.num_swaps = 0
        self._num_unanswered = 0  # plans whose copies to the host may not have been made
        self.clear()

    @property
    def is_leaving(self) -> bool:
        """Whether KV that is to be copied to the host may still be in blocks that are free: plans
        may use these, which come later, but not what writes to the device beside plans."""
        return bool(self.swap_out) or self._num_unanswered > 0

    def planned(self) -> None:
        """A plan carries the pending copies."""
        self._num_unanswered += bool(self.swap_out)
        self.clear()

    def answered(self, returned: Sequence[int], left: bool) -> None:
        """A plan has been executed, or has failed, whose copies from the host have returned these
        host blocks. left: it carried copies to the host."""
        self.host.free(returned)
        self._num_unanswered -= left

    def lose_device(self) -> None:
        """The stages are new."""
        self.host.reset()
        self._num_unanswered = 0
        self.clear()

    def clear(self) -> None:
        """Clear pending copies."""
        self.is_pending = False  # whether the lists below hold anything
        self.swap_out: list[tuple[int, int]] = []
        self.swapped_out: list[RequestState] = []  # requests whose copies are in swap_out
        self.swap_in: list[tuple[int, int]] = []
        self.returned: list[int] = []  # host blocks, free once the plan with swap_in is done

    def pays(self, state: RequestState) -> bool:
        """Whether moving the KV to the host and back is faster than computing it again."""
        choice, size = self.config.swap, self.config.block_size
        num_blocks = -(-state.num_computed_tokens // size)
        if choice == "never" or not 0 < num_blocks <= self.host.num_free:
            return False
        if state.request.pooling not in (None, "last"):  # stages need every hidden state anew
            return False
        if choice == "always":
            return True
        if self.cost_model is None:
            return False
        recompute_s = self.cost_model.step_s(StepShape(prefills=((0, state.num_computed_tokens),)))
        return 2 * self.cost_model.swap_s(num_blocks) < recompute_s

    def move_out(self, state: RequestState) -> None:
        """Copy the computed KV to the host in the next plan, which frees the device blocks."""
        num_blocks = -(-state.num_computed_tokens // self.config.block_size)
        self.is_pending = True
        state.host_blocks = self.host.allocate(num_blocks)
        self.swap_out += zip(state.block_table, state.host_blocks, strict=False)
        self.swapped_out.append(state)
        self.num_swaps += 1

    def move_in(self, state: RequestState) -> None:
        """Copy it back into the request's new blocks in the next plan."""
        self.is_pending = True
        self.swap_in += zip(state.host_blocks, state.block_table, strict=False)
        self.returned += state.host_blocks
        state.host_blocks = []

    def drop(self, state: RequestState) -> None:
        """Drop the copy."""
        self.host.free(state.host_blocks)
        state.host_blocks = []

    def distrust(self, state: RequestState) -> None:
        """Drop the swapped KV, which may be incomplete: it is computed again."""
        if state.host_blocks and state.status is RequestStatus.WAITING:
            self.drop(state)
            state.num_computed_tokens = 0
