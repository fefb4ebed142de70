"""The paged KV cache of one rank: device blocks of every layer, and host blocks to swap to."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import torch

from actors.scheduling.plan import StepPlan
from kernels.interface import AttentionShape, Backend, KVLayer

_PART_BYTES = 1 << 30


def _ignore(block: int) -> None:
    pass


@contextlib.contextmanager
def _names(key: str, *errors: type[Exception]) -> Iterator[None]:
    try:
        yield
    except errors as error:  # torch's, of several lines on a GPU
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{key}: {first}") from error


def blocks_of_part(num_blocks: int, block_bytes: int, are_pinned: bool) -> int:
    """How many host blocks are allocated at once. torch pins whole powers of two of bytes: in one
    piece, 20 GiB would take 32."""
    return max(1, min(num_blocks, _PART_BYTES // block_bytes)) if are_pinned else num_blocks


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
        """Raises ValueError naming the setting of what does not fit."""
        self._backend = backend
        self._device = device
        self._on_gpu = device.type == "cuda"
        self.layers: Sequence[KVLayer] = []
        # On a GPU the backend also compiles and runs kernels, whose errors no size mends.
        errors = (torch.OutOfMemoryError,) if self._on_gpu else (OSError, RuntimeError)
        if num_layers:  # a stage may have no attention
            with _names("kv.memory_gib, kv.memory_fraction", *errors):
                self.layers = backend.allocate_kv(
                    num_layers, num_blocks, block_size, shape, dtype, device
                )
        self.on_write: Callable[[int], None] = _ignore  # called with a block that `write` replaced
        self._host: list[torch.Tensor] = []  # (blocks of a part, layers, ...) each
        if num_host_blocks and self.layers:
            step = blocks_of_part(num_host_blocks, self.block_bytes, self._on_gpu)
            begins = range(0, num_host_blocks, step)
            with _names("kv.swap_gib", OSError, RuntimeError):
                self._host = [self._places(min(step, num_host_blocks - i)) for i in begins]

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

    @functools.cached_property
    def _passage(self) -> torch.Tensor:
        """Where blocks pass that are read and written: on a GPU one transfer each."""
        return self._places(1)

    def _places(self, num_blocks: int) -> torch.Tensor:
        """Host memory for blocks of all layers."""
        sample = self._sample
        size = (num_blocks, len(self.layers), *sample.shape)
        return torch.empty(size, dtype=sample.dtype, pin_memory=self._on_gpu)

    def read(self, block: int) -> bytearray:
        """The bytes of one block, layer after layer. For one thread, which `write` shares."""
        content = bytearray(self.block_bytes)
        if self._on_gpu:
            self._backend.read_blocks(self.layers, [block], [self._passage[0]])
            self._wait()
            self._parts(content).copy_(self._passage[0])
        else:
            self._backend.read_blocks(self.layers, [block], [self._parts(content)])
        return content

    def write(self, block: int, content: bytearray) -> None:
        """Put back what `read` returned, of a cache of the same shape."""
        if self._on_gpu:
            self._passage[0].copy_(self._parts(content))
            self._backend.write_blocks(self.layers, [block], [self._passage[0]])
            self._wait()  # the passage is used again
        else:
            self._backend.write_blocks(self.layers, [block], [self._parts(content)])
        self.on_write(block)

    def device_places(self, num_blocks: int) -> torch.Tensor:
        """Memory beside the cache, on its device, for so many blocks of all layers."""
        sample = self._sample
        size = (num_blocks, len(self.layers), *sample.shape)
        return torch.empty(size, dtype=sample.dtype, device=self._device)

    def copy_out(self, block: int, place: torch.Tensor) -> None:
        """One block into one of the `device_places`; it is there on return."""
        self._backend.read_blocks(self.layers, [block], [place])
        self._wait()

    def copy_in(self, blocks: Sequence[int], places: torch.Tensor) -> None:
        """Blocks from as many of the `device_places`, of a cache of the same shape."""
        self._backend.write_blocks(self.layers, blocks, list(places))
        self._wait()
        for block in blocks:
            self.on_write(block)

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()

    def _parts(self, content: bytearray) -> torch.Tensor:
        """The memory of `content`, seen as a block of each layer."""
        flat = torch.frombuffer(content, dtype=self._sample.dtype)
        return flat.view(len(self.layers), *self._sample.shape)

    def _host_place(self, block: int) -> torch.Tensor:
        part, number = divmod(block, len(self._host[0]))
        return self._host[part][number]

    def transfer(self, plan: StepPlan) -> None:
        """Execute the plan's swaps and copies, in its order: out, in, then device to device. On a
        GPU they are queued before the step: nothing waits."""
        if plan.swap_out and self._host:
            blocks, host_blocks = zip(*plan.swap_out, strict=True)
            self._backend.read_blocks(self.layers, blocks, list(map(self._host_place, host_blocks)))
        if plan.swap_in and self._host:
            host_blocks, blocks = zip(*plan.swap_in, strict=True)
            places = list(map(self._host_place, host_blocks))
            self._backend.write_blocks(self.layers, blocks, places)
        if plan.copies:
            self._backend.copy_blocks(self.layers, plan.copies)
