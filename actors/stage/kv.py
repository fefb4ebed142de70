"""The paged KV cache of one rank: device blocks of every layer, and host blocks to swap to."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class _Group:
    """Layers whose blocks are of one shape, that of `sample`, and where these lie among the bytes
    of a block of all layers."""

    layers: Sequence[KVLayer]
    sample: torch.Tensor
    begin: int

    @property
    def end(self) -> int:
        return self.begin + len(self.layers) * self.sample.nbytes

    def part(self, place: torch.Tensor) -> torch.Tensor:
        """These layers' part of a block's bytes, as the backend takes it: (layers, ...)."""
        typed = place[self.begin : self.end].view(self.sample.dtype)
        return typed.view(len(self.layers), *self.sample.shape)


class KVCache:
    """Device blocks have the backend's own layout; host blocks are opaque copies of them, layers of
    one shape side by side."""

    def __init__(
        self,
        backend: Backend,
        shapes: Sequence[AttentionShape],
        num_blocks: int,
        num_host_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """shapes: one per layer. Raises ValueError naming the setting of what does not fit."""
        self._backend = backend
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._kinds: list[Sequence[KVLayer]] = []  # layers whose blocks are of one shape
        # On a GPU the backend also compiles and runs kernels, whose errors no size mends.
        errors = (torch.OutOfMemoryError,) if self._on_gpu else (OSError, RuntimeError)
        numbers: dict[tuple[int, int], list[int]] = {}
        for number, shape in enumerate(shapes):
            numbers.setdefault((shape.num_kv_heads, shape.head_dim), []).append(number)
        by_number: dict[int, KVLayer] = {}
        for some in numbers.values():
            with _names("kv.memory_gib, kv.memory_fraction", *errors):
                layers = backend.allocate_kv(
                    len(some), num_blocks, block_size, shapes[some[0]], dtype, device
                )
            self._kinds.append(layers)
            by_number.update(zip(some, layers, strict=True))
        self.layers: Sequence[KVLayer] = [by_number[number] for number in range(len(shapes))]
        self.on_write: Callable[[int], None] = _ignore  # called with a block that `write` replaced
        self._host: list[torch.Tensor] = []  # (blocks of a part, bytes of a block) each
        if num_host_blocks and self.layers:
            step = blocks_of_part(num_host_blocks, self.block_bytes, self._on_gpu)
            begins = range(0, num_host_blocks, step)
            with _names("kv.swap_gib", OSError, RuntimeError):
                self._host = [self._places(min(step, num_host_blocks - i)) for i in begins]

    def wait_for_memory(self, limit_s: float) -> None:
        """See `Backend.wait_for_memory`."""
        until_s = time.monotonic() + limit_s
        for layers in self._kinds:
            self._backend.wait_for_memory(layers, max(0.0, until_s - time.monotonic()))

    @functools.cached_property
    def _groups(self) -> Sequence[_Group]:
        groups: list[_Group] = []
        for layers in self._kinds:
            sample = self._backend.read_block(layers[0], 0)
            groups.append(_Group(layers, sample, groups[-1].end if groups else 0))
        return groups

    @property
    def block_bytes(self) -> int:
        """Size of a block as `read` returns it."""
        return self._groups[-1].end if self._groups else 0

    @functools.cached_property
    def _passage(self) -> torch.Tensor:
        """Where blocks pass that are read and written: on a GPU one transfer each."""
        return self._places(1)

    def _places(self, num_blocks: int) -> torch.Tensor:
        """Host memory for blocks of all layers."""
        size = (num_blocks, self.block_bytes)
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._on_gpu)

    def read(self, block: int) -> bytearray:
        """The bytes of one block, layer after layer. For one thread, which `write` shares."""
        content = bytearray(self.block_bytes)
        if self._on_gpu:
            self._read_blocks([block], [self._passage[0]])
            self._wait()
            _bytes_of(content).copy_(self._passage[0])
        else:
            self._read_blocks([block], [_bytes_of(content)])
        return content

    def write(self, block: int, content: bytearray) -> None:
        """Put back what `read` returned, of a cache of the same shape."""
        if self._on_gpu:
            self._passage[0].copy_(_bytes_of(content))
            self._write_blocks([block], [self._passage[0]])
            self._wait()  # the passage is used again
        else:
            self._write_blocks([block], [_bytes_of(content)])
        self.on_write(block)

    def device_places(self, num_blocks: int) -> torch.Tensor:
        """Memory beside the cache, on its device, for so many blocks of all layers."""
        size = (num_blocks, self.block_bytes)
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def copy_out(self, block: int, place: torch.Tensor) -> None:
        """One block into one of the `device_places`; it is there on return."""
        self._read_blocks([block], [place])
        self._wait()

    def copy_in(self, blocks: Sequence[int], places: torch.Tensor) -> None:
        """Blocks from as many of the `device_places`, of a cache of the same shape."""
        self._write_blocks(blocks, list(places))
        self._wait()
        for block in blocks:
            self.on_write(block)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """`Backend.copy_blocks` in all layers."""
        for layers in self._kinds:
            self._backend.copy_blocks(layers, pairs)

    def _read_blocks(self, blocks: Sequence[int], places: Sequence[torch.Tensor]) -> None:
        for group in self._groups:
            self._backend.read_blocks(group.layers, blocks, list(map(group.part, places)))

    def _write_blocks(self, blocks: Sequence[int], places: Sequence[torch.Tensor]) -> None:
        for group in self._groups:
            self._backend.write_blocks(group.layers, blocks, list(map(group.part, places)))

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()

    def _host_place(self, block: int) -> torch.Tensor:
        part, number = divmod(block, len(self._host[0]))
        return self._host[part][number]

    def transfer(self, plan: StepPlan) -> None:
        """Execute the plan's swaps and copies, in its order: out, in, then device to device. On a
        GPU they are queued before the step: nothing waits."""
        if plan.swap_out and self._host:
            blocks, host_blocks = zip(*plan.swap_out, strict=True)
            self._read_blocks(blocks, list(map(self._host_place, host_blocks)))
        if plan.swap_in and self._host:
            host_blocks, blocks = zip(*plan.swap_in, strict=True)
            self._write_blocks(blocks, list(map(self._host_place, host_blocks)))
        if plan.copies:
            self.copy(plan.copies)


def _bytes_of(content: bytearray) -> torch.Tensor:
    """The memory of `content`."""
    return torch.frombuffer(content, dtype=torch.uint8)
