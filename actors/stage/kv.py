"""The paged KV cache of one rank: device blocks of every layer, and host blocks to swap to."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from actors.scheduling.plan import StepPlan
from kernels.interface import AttentionShape, Backend, KVLayer


def _ignore(block: int) -> None:
    pass


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
        self.on_write: Callable[[int], None] = _ignore  # called with a block that `write` replaced
        self._host: list[torch.Tensor] = []
        if num_host_blocks and self.layers:
            block, pin = self._sample, device.type == "cuda"
            self._host = [
                torch.empty((num_host_blocks, *block.shape), dtype=block.dtype, pin_memory=pin)
                for _ in self.layers
            ]

    def wait_for_memory(self, limit_s: float) -> None:
        """See `Backend.wait_for_memory`."""
        self._backend.wait_for_memory(self.layers, limit_s)

    @functools.cached_property
    def _sample(self) -> torch.Tensor:
        """A block of one layer, for its shape and type: those of all layers."""
        return self._backend.read_block(self.layers[0], 0)

    @property
    def block_bytes(self) -> int:
        """Size of a block as `read` returns it."""
        return len(self.layers) * self._sample.nbytes

    def read(self, block: int) -> bytearray:
        """The bytes of one block, layer after layer."""
        content = bytearray(self.block_bytes)
        for layer, part in zip(self.layers, self._parts(content), strict=True):
            part.copy_(self._backend.read_block(layer, block))
        return content

    def write(self, block: int, content: bytearray) -> None:
        """Put back what `read` returned, of a cache of the same shape."""
        for layer, part in zip(self.layers, self._parts(content), strict=True):
            self._backend.write_block(layer, block, part)
        self.on_write(block)

    def _parts(self, content: bytearray) -> torch.Tensor:
        """The same memory, seen as a block of each layer."""
        flat = torch.frombuffer(content, dtype=self._sample.dtype)
        return flat.view(len(self.layers), *self._sample.shape)

    def transfer(self, plan: StepPlan) -> None:
        """Execute the plan's swaps and copies, in its order: out, in, then device to device."""
        for block, host_block in plan.swap_out:
            for layer, host in zip(self.layers, self._host, strict=True):
                host[host_block].copy_(self._backend.read_block(layer, block))
        for host_block, block in plan.swap_in:
            for layer, host in zip(self.layers, self._host, strict=True):
                self._backend.write_block(layer, block, host[host_block])
        if plan.copies:
            self._backend.copy_blocks(self.layers, plan.copies)
