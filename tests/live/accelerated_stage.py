"""A stage that claims to own an accelerator, so that Ray's graph sends its tensors out of band.

Ray refuses its accelerator channels to processes whose device is the CPU. The claim is the only
untrue thing here: the graph, its channels, the communicator and the bytes over gloo are real.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from ray.experimental.channel import ChannelContext
from ray.experimental.channel.accelerator_context import AcceleratorContext

from actors.stage import step_times
from actors.stage.actor import StageActor
from actors.transport.communicator import StageCommunicator

SECONDS = 7.0


class Claimed:
    """Equals every CPU tensor's device, and is not called "cpu"."""

    type = "accelerator"

    def __eq__(self, other: object) -> bool:
        return other == torch.device("cpu")

    __hash__ = None  # type: ignore[assignment]


class _Context(AcceleratorContext):
    accelerator_count = 1  # type: ignore[assignment]

    def get_device_context(self, device: object) -> AbstractContextManager[None]:
        return nullcontext()


class _Event:
    """A device's event: every step is said to take SECONDS, however soon the host went on."""

    def __init__(self) -> None:
        self.at_s = 0.0

    def record(self) -> None:
        self.at_s = time.monotonic()

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: _Event) -> float:
        assert 0 < self.at_s <= end.at_s
        return 1000 * SECONDS


class AcceleratedStage(StageActor):
    """Counts what it has sent and received through the communicator."""

    def __init__(self, spec: Any, channel_bytes: int | None = None) -> None:
        AcceleratorContext.set(_Context("cpu", StageCommunicator))
        ChannelContext.get_current().set_torch_device(Claimed())  # type: ignore[arg-type]
        self.num_sent = self.num_received = 0
        send, recv = StageCommunicator.send, StageCommunicator.recv

        def counted_send(*arguments: Any) -> None:
            self.num_sent += 1
            send(*arguments)

        def counted_recv(*arguments: Any) -> torch.Tensor:
            self.num_received += 1
            return recv(*arguments)

        StageCommunicator.send = counted_send  # type: ignore[method-assign]
        StageCommunicator.recv = counted_recv  # type: ignore[method-assign]
        super().__init__(spec, channel_bytes)
        step_times.new_event = _Event

    def traffic(self) -> tuple[int, int]:
        return self.num_sent, self.num_received
