"""Activations from stage to stage over torch.distributed, for the graph's accelerator transport.

Ray's own communicator needs cupy; this one is a process group like those of tensor parallelism:
NCCL between GPUs, so that hidden states never touch host memory. Sends are asynchronous, so a
stage's next micro-batch does not wait for the receiver. (The tests use gloo, which has the same
interface, to check the ordering without a GPU.)
"""

from __future__ import annotations

import os
import uuid
from collections import deque
from collections.abc import Sequence
from typing import Any

import ray
import torch
from ray.experimental.channel import ChannelContext
from ray.experimental.channel.accelerator_context import register_accelerator_context
from ray.experimental.channel.communicator import Communicator, TorchTensorAllocator

from actors.transport.group import RankGroup, keep_errors_of_nccl

_NEVER_ASKED = "Legato's graphs neither overlap communication nor hold collectives"


def claim_device(kind: str) -> torch.device:
    """This process's device of a kind, made known to Ray, whose graphs enter it even if nothing is
    sent from it: left to itself, Ray finds none where ranks see all GPUs."""
    device = assigned_device(kind)
    if device.type == "cuda":
        keep_errors_of_nccl()
        register_context(device)
    return device


def assigned_device(kind: str) -> torch.device:
    """This process's device of a kind: among GPUs, the one that Ray has assigned."""
    device = torch.device(kind)
    ids = ray.get_gpu_ids() if device.type == "cuda" and ray.is_initialized() else []
    if not ids:
        return device
    # Ray's ids count the node's GPUs, or are names from its CUDA_VISIBLE_DEVICES; torch counts
    # those that this process sees: one, or all of them where ranks share memory (`placement`).
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    index = int(ids[0]) if visible is None else visible.split(",").index(str(ids[0]))
    return torch.device(device.type, index)


def register_context(device: torch.device) -> None:
    """Make Ray's channels in this process use this device and this communicator's ids. Ray's
    default for GPUs needs cupy, even if a graph brings its own communicator.
    """
    register_accelerator_context(device.type, StageCommunicator)
    ChannelContext.get_current().set_torch_device(device)


class StageCommunicator(Communicator):
    """All ranks of all stages in one group; only neighbors communicate.

    Made where the graph is compiled, then copied into every actor, where Ray calls
    `initialize`. Not thread-safe: Ray's graph loop is the only caller.
    """

    def __init__(self, actors: Sequence[Any], address: str, device: str) -> None:
        """actors: handles in the order of ranks. address: "host:port" of the group's store, on
        the node of actors[0]. device: "cuda" or "cpu"."""
        self._actors = list(actors)
        self._address = address
        self._device = torch.device(device)
        self._rank: int | None = None
        self._group: RankGroup | None = None
        # Keeps the tensors of unfinished sends alive, since nothing waits for a send.
        self._sending: deque[tuple[Any, torch.Tensor]] = deque()

    def initialize(self, rank: int) -> None:
        self._rank = rank
        self._group = RankGroup(rank, len(self._actors), self._address, self._device)

    def get_actor_handles(self) -> list[Any]:
        return self._actors

    def get_rank(self, actor: Any) -> int:
        ids = [handle._actor_id for handle in self._actors]
        return ids.index(actor._actor_id)

    def get_self_rank(self) -> int | None:
        return self._rank

    def get_world_size(self) -> int:
        return len(self._actors)

    def send(self, value: torch.Tensor, peer_rank: int) -> None:
        """Starts sending and returns: a stage that waited for its successor to receive would
        stall its own next micro-batch."""
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()
        value = value.contiguous()
        self._sending.append((self._joined().send(value, peer_rank), value))

    def recv(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        peer_rank: int,
        allocator: TorchTensorAllocator | None = None,
    ) -> torch.Tensor:
        """The tensor, ready for what the caller's stream runs next."""
        received = torch.empty(shape, dtype=dtype, device=self._device)
        self._joined().receive(received, peer_rank)
        return received

    def destroy(self) -> None:
        group, self._group = self._group, None
        self._sending.clear()
        if group is not None:
            group.close()

    def get_transport_name(self) -> str:
        return "accelerator"

    @classmethod
    def generate_communicator_id(cls) -> str:
        return uuid.uuid4().hex

    def _joined(self) -> RankGroup:
        if self._group is None:
            raise RuntimeError("communicator used before initialize() or after destroy()")
        return self._group

    # Ray needs these only if a graph overlaps communication or has collectives: this graph
    # does neither (the ranks of a stage reduce among themselves, see RankGroup).

    @property
    def recv_stream(self) -> Any:
        raise NotImplementedError(_NEVER_ASKED)

    @property
    def send_stream(self) -> Any:
        raise NotImplementedError(_NEVER_ASKED)

    def allgather(self, send_buf: torch.Tensor, recv_buf: torch.Tensor) -> None:
        raise NotImplementedError(_NEVER_ASKED)

    def allreduce(self, send_buf: torch.Tensor, recv_buf: torch.Tensor, op: Any = None) -> None:
        raise NotImplementedError(_NEVER_ASKED)

    def reducescatter(self, send_buf: torch.Tensor, recv_buf: torch.Tensor, op: Any = None) -> None:
        raise NotImplementedError(_NEVER_ASKED)
