"""Small all-reduces through memory that all GPUs of a stage see (torch's symmetric memory).

A decode step reduces tens of kilobytes sixty-odd times, and NCCL's latency is then most of their
cost. Here every rank writes its part where its peers can read it, and one kernel adds them up: each
rank all of it (one shot, least latency), or each rank a share, which all then collect (two shots,
least traffic). Larger tensors and float16 use NCCL. `peers` is for kernels that sum by themselves.

All of these tell each other by atomic operations on a peer's memory. PCIe has none, and kernels
that wait for such a count never end, so other GPUs than those joined by NVLink are refused.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any

import torch

from kernels.all_reduce import PEER_ROWS, PeerMemory

ONE_SHOT_BYTES = 256 << 10  # up to here latency decides, beyond it traffic
BUFFER_BYTES = 8 << 20
_ALIGNMENT_BYTES = 16  # the kernels move whole vectors
_SUMMED_DTYPES = (torch.bfloat16, torch.float32)  # by torch's operators; `peers` serves any
_WINDOWS_BYTE = BUFFER_BYTES + 8 * PEER_ROWS  # where those of `peers` begin, behind its counts
_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


class SymmetricMemory:
    """One buffer per rank, mapped by all. Every rank makes the same calls in the same order."""

    def __init__(
        self, name: str, group: Any, store: Any, dtype: torch.dtype, hidden_size: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        """name: the same on all ranks, used by no other group. group: the ranks' process group
        (of one backend); store: torch.distributed's. hidden_size: of the rows of `peers`. Raises
        RuntimeError, of torch or of `check_links`, for GPUs that cannot share memory."""
        from torch._C._distributed_c10d import _SymmetricMemory

        self._name = name
        self._dtype = dtype
        rank, size = group.rank(), group.size()
        if device.type == "cuda":
            store.set(f"index {rank}", str(device.index or 0))
            check_links([int(store.get(f"index {r}")) for r in range(size)], has_atomics)
        # Some versions of torch look up ranks and store by what is set here, newer ones by the
        # name of a registered process group.
        _SymmetricMemory.set_group_info(name, rank, size, store)
        self._group = _registered(name, group, store, device)
        rows = min(PEER_ROWS, ONE_SHOT_BYTES // (hidden_size * dtype.itemsize))
        num_bytes = _WINDOWS_BYTE + 2 * rows * hidden_size * dtype.itemsize
        self._buffer = _SymmetricMemory.empty_strided_p2p(
            (num_bytes // dtype.itemsize,), (1,), dtype, device, name
        )
        counts_P = self._buffer.view(torch.uint8)[BUFFER_BYTES:_WINDOWS_BYTE].view(torch.int64)
        counts_P.zero_()
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # before another rank, which the rendezvous awaits, adds
        self._mapping = _SymmetricMemory.rendezvous(self._buffer)
        windows_2PH = self._buffer[_WINDOWS_BYTE // dtype.itemsize :].view(2, rows, hidden_size)
        pointers = self._mapping.buffer_ptrs
        within = self._buffer.data_ptr() - pointers[rank]  # where the buffer begins in its mapping
        self.peers = PeerMemory(
            windows_2PH,
            counts_P,
            torch.zeros_like(counts_P),
            torch.tensor(
                [[p + within + byte for p in pointers] for byte in (BUFFER_BYTES, _WINDOWS_BYTE)],
                device=device,
            ),
        )

    def close(self) -> None:
        """Forget the group's name."""
        from torch._C._distributed_c10d import _unregister_process_group

        _unregister_process_group(self._name)  # type: ignore[arg-type]

    def fits(self, x: torch.Tensor) -> bool:
        num_bytes = x.numel() * x.element_size()
        aligned = num_bytes % _ALIGNMENT_BYTES == 0 and x.is_contiguous()
        is_summed = x.dtype == self._dtype and x.dtype in _SUMMED_DTYPES
        return is_summed and aligned and 0 < num_bytes <= BUFFER_BYTES

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in place; returns x, which must fit."""
        flat = x.view(-1)
        window = self._buffer[: flat.numel()]
        window.copy_(flat)
        if flat.numel() * flat.element_size() <= ONE_SHOT_BYTES:
            torch.ops.symm_mem.one_shot_all_reduce_out(window, "sum", self._name, flat)
        else:
            torch.ops.symm_mem.two_shot_all_reduce_(window, "sum", self._name)
            flat.copy_(window)
        return x


def check_links(indices: Sequence[int], has_atomics: Callable[[int, int], bool]) -> None:
    """Raises RuntimeError where one of these GPUs has no atomic operations on another's memory."""
    for one, other in permutations(sorted(set(indices)), 2):
        if not has_atomics(one, other):
            raise RuntimeError(
                f"cuda:{one} has no atomic operations on the memory of cuda:{other} (are they "
                "joined by NVLink?)"
            )


def has_atomics(index: int, peer: int) -> bool:
    """Whether the driver says that a GPU can update the other's memory atomically."""
    found = ctypes.c_int(0)
    driver = ctypes.CDLL("libcuda.so.1")
    error = driver.cuDeviceGetP2PAttribute(ctypes.byref(found), _NATIVE_ATOMICS, index, peer)
    return bool(error == 0 and found.value)


def _registered(name: str, backend: Any, store: Any, device: torch.device) -> Any:
    """A process group around one backend, which torch's operators find by its name."""
    from torch._C import _distributed_c10d

    group = _distributed_c10d.ProcessGroup(store, backend.rank(), backend.size())
    kinds = _distributed_c10d.ProcessGroup.BackendType
    kind = kinds.NCCL if device.type == "cuda" else kinds.GLOO
    group._set_default_backend(kind)
    group._register_backend(torch.device(device.type), kind, backend)
    group._set_group_name(name)  # type: ignore[arg-type]
    _distributed_c10d._register_process_group(name, group)  # type: ignore[arg-type]
    return group
