"""The paged KV cache of one rank: device blocks of every layer, and host blocks to swap to."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from actors.scheduling.plan import StepPlan
from kernels.interface import AttentionShape, Backend, KVLayer


class KVCache:
    """Device blocks have the backend's own layout; host blocks are opaque copies of them."""

    def __init__(
        self,
        backend: Backend,
        num_layers: int,
        num_blocks: int,
        num_host_blocks: int,
        block_size: int,
        shape: AttentionShape,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._backend = backend
        self.layers: Sequence[KVLayer] = backend.allocate_kv(
            num_layers, num_blocks, block_size, shape, dtype, device
        )
        self._host: list[torch.Tensor] = []
        if num_host_blocks and self.layers:
            block = backend.read_block(self.layers[0], 0)
            pin = device.type == "cuda"
            self._host = [
                torch.empty((num_host_blocks, *block.shape), dtype=block.dtype, pin_memory=pin)
                for _ in self.layers
            ]

    def transfer(self, plan: StepPlan) -> None:
        """Execute the plan's swaps and copies, in its order: out, in, then device to device."""
        if plan.swap_out or plan.swap_in:
            self._backend.swap_blocks(self.layers, self._host, plan.swap_out, plan.swap_in)
        if plan.copies:
            self._backend.copy_blocks(self.layers, plan.copies)
