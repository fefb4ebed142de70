"""Communication of ranks: all-reduce, gather and broadcast in a stage, send between stages.

Each group is a separate process group object, not torch's global one, because a process may hold
ranks of several stages. gloo on CPU, NCCL on CUDA.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed

from actors.transport.shared_memory import shared_file
from actors.transport.symmetric import SymmetricMemory
from kernels.all_reduce import AllReduce, PeerMemory, ShareFile

# The classes behind torch.distributed's functions are public but typed only in part.
dist: Any = torch.distributed
_AllgatherOptions: Any = torch._C._distributed_c10d.AllgatherOptions

_TIMEOUT = timedelta(seconds=300)

MakeAllReduce = Callable[[int, int, ShareFile], AllReduce | None]


class RankGroup:
    """`size` ranks; with one rank every operation is the identity."""

    def __init__(self, rank: int = 0, size: int = 1, address: str | None = None,
                 device: torch.device | None = None) -> None:  # fmt: skip
        self.rank = rank
        self.size = size
        self._group: Any = None
        self._symmetric: SymmetricMemory | None = None
        self.sums: AllReduce | None = None  # through memory, where all ranks share a machine
        if size == 1:
            return
        if address is None:
            raise ValueError(f"tensor_ranks is {size}: group_address must be host:port")
        self._address = address
        self._device = device or torch.device("cpu")
        host, _, port = address.rpartition(":")
        self._store = make_store(host, int(port), rank, size)
        if self._device.type == "cuda":
            self._group = dist.ProcessGroupNCCL(self._store, rank, size, nccl_options())
        else:
            self._group = dist.ProcessGroupGloo(self._store, rank, size, gloo_options(host))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in place; returns x."""
        if self._symmetric is not None and self._symmetric.fits(x):
            return self._symmetric.all_reduce(x)
        if self.sums is not None and self.sums.try_all_reduce(x):
            return x
        if self._group is not None:
            _finish(self._group.allreduce([x], self._inline(dist.AllreduceOptions())))
        return x

    def use_shared_memory(self, make: MakeAllReduce) -> None:
        """From now on sum on CPUs through shared memory, if all ranks are on one machine. Every
        rank calls this; with one rank it does nothing.
        """
        if self._group is not None and self._device.type == "cpu":
            share = partial(shared_file, self._store, self.rank, self.size)
            self.sums = make(self.rank, self.size, share)

    @property
    def peers(self) -> PeerMemory | None:
        """For kernels that sum over ranks by themselves; None where they cannot."""
        return None if self._symmetric is None else self._symmetric.peers

    def use_symmetric_memory(self, dtype: torch.dtype, hidden_size: int) -> None:
        """From now on all-reduce small tensors of this type through symmetric memory. Every rank
        calls this; with one rank it does nothing. Raises ValueError naming the setting."""
        if self._group is not None:
            store = dist.PrefixStore("symmetric", self._store)
            name = f"legato/{self._address}"
            try:
                self._symmetric = SymmetricMemory(
                    name, self._group, store, dtype, hidden_size, self._device
                )
            except RuntimeError as error:  # torch's own say nothing of what asked for it
                raise ValueError(f"parallel.symmetric_memory: {error}") from error

    def gather_columns(self, local_RV: torch.Tensor) -> torch.Tensor | None:
        """Ranks' columns side by side on rank 0; None elsewhere. Shapes are equal on all ranks."""
        if self._group is None:
            return local_RV
        gathered_SRV = self.gather_all(local_RV)
        return gathered_SRV.transpose(0, 1).flatten(1) if self.rank == 0 else None

    def gather_all(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's x, of equal shapes, along a new first dimension, on every rank."""
        if self._group is None:
            return x[None]
        # Into one tensor: gathered to a list, each part would be copied once more.
        all_x = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        options = self._inline(_AllgatherOptions())
        flat = x.contiguous().view(-1)
        _finish(self._group._allgather_base(all_x.view(-1), flat, options))
        return all_x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's x, in place, on every rank."""
        if self._group is not None:
            _finish(self._group.broadcast([x], self._inline(dist.BroadcastOptions())))
        return x

    def _inline(self, options: Any) -> Any:
        """On GPUs the caller's stream runs the operation: a stream of NCCL's own would have to be
        forked and joined by events, in a graph twice per layer."""
        options.asyncOp = self._device.type != "cuda"
        return options

    def send(self, x: torch.Tensor, rank: int) -> Any:
        """Start sending x; returns the work: once it is done, x may be overwritten."""
        return self._group.send([x], rank, 0)

    def receive(self, x: torch.Tensor, rank: int) -> None:
        """Fill x; on a GPU, before anything that is queued on this stream later."""
        self._group.recv([x], rank, 0).wait()

    def close(self) -> None:
        """Leave the group; ranks still waiting in an operation get an error."""
        if self._symmetric is not None:
            self._symmetric.close()
        if self.sums is not None:
            self.sums.close()
        if self._group is not None:
            self._group.shutdown()
            self._group = self._symmetric = None
            del self._store


def _finish(work: Any) -> None:
    """An operation of the caller's stream has no work to wait for."""
    if work is not None:
        work.wait()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def make_store(host: str, port: int, rank: int, size: int, timeout: timedelta = _TIMEOUT) -> Any:
    """Rank 0 serves the store, on the named address only: torch's default is every interface."""
    if rank != 0:
        return dist.TCPStore(host, port, size, is_master=False, timeout=timeout)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host.strip("[]"), port))
    listener.listen()
    return dist.TCPStore(
        host, port, size, is_master=True, timeout=timeout, wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip


def keep_errors_of_nccl() -> None:
    """Call it before the first group of a process: torch would end the process, or hold it up for
    minutes, when a communicator fails. What a failure means is the engine's to say: it has a
    deadline for every step, and a pair's other side may die at any time."""
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "0")


def nccl_options(timeout: timedelta = _TIMEOUT) -> Any:
    """timeout: of an operation, after which torch takes it for hung."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return options


def gloo_options(host: str, timeout: timedelta = _TIMEOUT) -> Any:
    """gloo pairs on the loopback interface when the store is there."""
    options = dist.ProcessGroupGloo._Options()
    hostname = "127.0.0.1" if _is_loopback(host.strip("[]")) else ""
    options._devices = [
        dist.ProcessGroupGloo.create_device(hostname=hostname)
        if hostname
        else dist.ProcessGroupGloo.create_default_device()
    ]
    options._timeout = timeout
    return options
