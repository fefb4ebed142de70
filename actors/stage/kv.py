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

    @property
    def block_bytes(self) -> int:
        """Of what `read` returns."""
        return sum(self._read(layer, 0).numel() for layer in self.layers)

    def read(self, block: int) -> bytearray:
        """The bytes of one block, layer after layer."""
        return bytearray(torch.cat([self._read(layer, block) for layer in self.layers]).numpy())

    def write(self, block: int, content: bytes | bytearray) -> None:
        """Put back what `read` returned, of a cache of the same shape."""
        flat, begin = torch.frombuffer(content, dtype=torch.uint8), 0
        for layer in self.layers:
            like = self._backend.read_block(layer, block)
            end = begin + like.nbytes
            self._backend.write_block(
                layer, block, flat[begin:end].view(like.dtype).view(like.shape)
            )
            begin = end

    def _read(self, layer: KVLayer, block: int) -> torch.Tensor:
        return self._backend.read_block(layer, block).reshape(-1).view(torch.uint8)

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
