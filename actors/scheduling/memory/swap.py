"""KV in host memory: what is moved instead of being computed again, and when that pays."""

from __future__ import annotations

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.interfaces import StepTimePredictor
from actors.scheduling.memory.block_manager import HostPool
from actors.scheduling.plan import StepShape
from actors.scheduling.state import RequestState, RequestStatus


class Swapper:
    """Host blocks and the copies that the next plan must make."""

    def __init__(self, config: SchedulerConfig, cost_model: StepTimePredictor | None) -> None:
        self.config = config
        self.cost_model = cost_model
        self.host = HostPool(config.num_host_blocks)
        self.num_swaps = 0
        self.clear()

    def clear(self) -> None:
        """Nothing is pending: the plan has been made, or the stages are new."""
        self.is_pending = False  # something for the next plan stands below
        self.swap_out: list[tuple[int, int]] = []
        self.swapped_out: list[RequestState] = []  # whose copies stand in swap_out
        self.swap_in: list[tuple[int, int]] = []
        self.returned: list[int] = []  # host blocks, free once the plan with swap_in is done

    def pays(self, state: RequestState) -> bool:
        """Whether moving the KV away and back beats computing it again."""
        choice, size = self.config.swap, self.config.block_size
        num_blocks = -(-state.num_computed_tokens // size)
        if choice == "never" or not 0 < num_blocks <= self.host.num_free:
            return False
        if choice == "always":
            return True
        if self.cost_model is None:
            return False
        recompute_s = self.cost_model.step_s(StepShape(prefills=((0, state.num_computed_tokens),)))
        return 2 * self.cost_model.swap_s(num_blocks) < recompute_s

    def move_out(self, state: RequestState) -> None:
        """The next plan copies the computed KV away; the device blocks are free from then on."""
        num_blocks = -(-state.num_computed_tokens // self.config.block_size)
        self.is_pending = True
        state.host_blocks = self.host.allocate(num_blocks)
        self.swap_out += zip(state.block_table, state.host_blocks, strict=False)
        self.swapped_out.append(state)
        self.num_swaps += 1

    def move_in(self, state: RequestState) -> None:
        """The next plan copies it back into the request's new blocks."""
        self.is_pending = True
        self.swap_in += zip(state.host_blocks, state.block_table, strict=False)
        self.returned += state.host_blocks
        state.host_blocks = []

    def drop(self, state: RequestState) -> None:
        """The copy is not needed any more."""
        self.host.free(state.host_blocks)
        state.host_blocks = []

    def distrust(self, state: RequestState) -> None:
        """What was swapped out cannot be relied upon: compute it again."""
        if state.host_blocks and state.status is RequestStatus.WAITING:
            self.drop(state)
            state.num_computed_tokens = 0
