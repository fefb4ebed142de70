"""Symmetric memory between processes of one machine, in place of torch's, which needs GPUs.

Buffers are files that every rank maps. The operators are registered under torch's own schemas, so
a call that would not fit them fails here too, and they insist on what the CUDA kernels need:
bfloat16 or float32, an input inside the caller's own buffer, at the same place on every rank,
contiguous, whole vectors. A rendezvous insists, as torch's does, on a registered process group and
on devices that differ.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch._C import _distributed_c10d

_VECTOR_BYTES = 16


class SharedMemory:
    """The class that `_SymmetricMemory` is, as far as Legato uses it."""

    groups: ClassVar[dict[str, SharedMemory]] = {}

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self.rank, self.size, self.store = rank, size, store
        self.name, self.device = "", torch.device("cpu")
        self.peers: list[torch.Tensor] = []
        self.num_barriers = self.num_one_shots = self.num_two_shots = 0

    @classmethod
    def set_group_info(cls, name: str, rank: int, size: int, store: Any) -> None:
        cls.groups[name] = cls(rank, size, store)

    @classmethod
    def empty_strided_p2p(
        cls,
        shape: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        name: str,
    ) -> torch.Tensor:
        group = cls.groups[name]
        assert tuple(stride) == (1,)
        group.name, group.device = name, device
        if group.rank == 0:
            group.store.set("folder", tempfile.mkdtemp(prefix="symmetric"))
        folder = Path(group.store.get("folder").decode())
        for rank in range(group.size):
            path = folder / str(rank)
            if rank == group.rank:
                path.write_bytes(bytes(shape[0] * dtype.itemsize))
                group.store.set(f"made {rank}", "")
            group.store.wait([f"made {rank}"])
            group.peers.append(torch.from_file(str(path), shared=True, size=shape[0], dtype=dtype))
        return group.peers[group.rank]

    @classmethod
    def rendezvous(cls, buffer: torch.Tensor) -> SharedMemory:
        (group,) = [g for g in cls.groups.values() if g.peers[g.rank] is buffer]
        registered = _distributed_c10d._resolve_process_group(group.name)  # type: ignore[arg-type]
        assert (registered.rank(), registered.size()) == (group.rank, group.size)
        index = group.rank if group.device.index is None else group.device.index
        group.store.set(f"device {group.rank}", str(index))
        group.barrier()
        devices = {group.store.get(f"device {rank}") for rank in range(group.size)}
        if len(devices) < group.size:
            raise RuntimeError("detected allocations from overlapping devices")
        return group

    @property
    def buffer_ptrs(self) -> list[int]:
        return [peer.data_ptr() for peer in self.peers]

    def barrier(self) -> None:
        self.num_barriers += 1
        self.store.set(f"at {self.num_barriers} {self.rank}", "")
        self.store.wait([f"at {self.num_barriers} {rank}" for rank in range(self.size)])

    def sum_of_all(self, window: torch.Tensor) -> torch.Tensor:
        mine = self.peers[self.rank]
        offset = (window.data_ptr() - mine.data_ptr()) // mine.element_size()
        assert 0 <= offset <= offset + window.numel() <= mine.numel(), "not in the buffer"
        assert window.is_contiguous()
        assert window.dtype in (torch.bfloat16, torch.float32), (
            f"not implemented for {window.dtype}"
        )
        assert window.numel() * window.element_size() % _VECTOR_BYTES == 0
        assert window.data_ptr() % _VECTOR_BYTES == 0
        self.barrier()
        parts = torch.stack([peer[offset : offset + window.numel()] for peer in self.peers])
        total = parts.float().sum(0).to(window.dtype)
        self.barrier()  # no rank overwrites what a peer still reads
        return total


def install() -> torch.library.Library:
    """Put it in torch's place in this process; keep what is returned."""
    _distributed_c10d._SymmetricMemory = SharedMemory  # type: ignore[misc, assignment]
    operators = torch.library.Library("symm_mem", "IMPL", "CPU")

    def one_shot(
        window: torch.Tensor, operation: str, name: str, out: torch.Tensor
    ) -> torch.Tensor:
        assert operation == "sum"
        SharedMemory.groups[name].num_one_shots += 1
        return out.copy_(SharedMemory.groups[name].sum_of_all(window).view(out.shape))

    def two_shot(window: torch.Tensor, operation: str, name: str) -> torch.Tensor:
        assert operation == "sum"
        SharedMemory.groups[name].num_two_shots += 1
        return window.copy_(SharedMemory.groups[name].sum_of_all(window))

    operators.impl("one_shot_all_reduce_out", one_shot)
    operators.impl("two_shot_all_reduce_", two_shot)
    return operators
