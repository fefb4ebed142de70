"""Two processes that move tensors between their devices: NCCL between GPUs, gloo between CPUs.

Neither side controls the other, which may die or stop at any moment. So every operation has a
limit, and after one that has failed the pair is of no more use.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed

from actors.transport.group import gloo_options, make_store, nccl_options

dist: Any = torch.distributed

_JOIN_WITHIN_S: Final = 20.0
_LOOK_EVERY_S: Final = 0.0002  # at an operation of a GPU: a wait within CUDA would have no limit
_HIGH: Final = -1  # streams of this priority are of another pool, and shared with no step


class TransferFailed(OSError):
    """The other side has died, or was too slow."""


class DevicePair:
    """One of two sides. Both make it with the same address, and get it once both are there.

    rank: 0 or 1; 0 serves the address, "host:port". Sides are used by one thread each. Raises
    TransferFailed, as all operations do. Between GPUs, making it may take for ever if the other
    side dies at the wrong moment: use a thread that can be spared.
    """

    def __init__(self, rank: int, address: str, device: torch.device) -> None:
        self._other = 1 - rank
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        self._group: Any = None
        self._store: Any = None
        host, _, port = address.rpartition(":")
        within = timedelta(seconds=_JOIN_WITHIN_S)
        with _failures():
            probe = torch.zeros(1, dtype=torch.uint8, device=device)
            self._store = make_store(host, int(port), rank, 2, within)
            if device.type == "cuda":
                self._stream = torch.cuda.Stream(device, _HIGH)  # type: ignore[no-untyped-call]
                options = nccl_options(within)
                options.is_high_priority_stream = True
                self._group = dist.ProcessGroupNCCL(self._store, rank, 2, options)
            else:
                options = gloo_options(host, within)
                self._group = dist.ProcessGroupGloo(self._store, rank, 2, options)
        # NCCL connects at the first operation, which no block should wait for.
        first, then = (self.send, self.receive) if rank else (self.receive, self.send)
        first([probe], _JOIN_WITHIN_S)
        then([probe], _JOIN_WITHIN_S)

    def send(self, tensors: Sequence[torch.Tensor], limit_s: float) -> None:
        """Send these, which the other side receives in this order. Contiguous, and complete: on a
        GPU, not only queued."""
        with self._apart():
            works = [self._group.send([_bytes_of(x)], self._other, 0) for x in tensors]
            self._finish(works, limit_s)

    def receive(self, tensors: Sequence[torch.Tensor], limit_s: float) -> None:
        """Fill these; they are complete on return."""
        with self._apart():
            works = [self._group.recv([_bytes_of(x)], self._other, 0) for x in tensors]
            self._finish(works, limit_s)

    def is_done(self) -> bool:
        """Whether nothing of this side is read or written any more, also by what has failed."""
        return self._stream is None or bool(self._stream.query())

    def close(self) -> None:
        """End the pair; what the other side still waits for fails there."""
        held = [self._group, self._store]
        self._group = self._store = None
        if held[0] is None:
            return
        if self._stream is None:
            with contextlib.suppress(RuntimeError):
                held[0].shutdown()
        else:  # it may wait for torch's watchdog, and its kernels until they are aborted
            threading.Thread(target=_abort, args=[held], daemon=True).start()

    def _finish(self, works: Sequence[Any], limit_s: float) -> None:
        deadline_s = time.monotonic() + limit_s
        for work in works:
            if self._stream is None:
                work.wait(timedelta(seconds=max(0.001, deadline_s - time.monotonic())))
            else:
                work.wait()  # the stream waits, not this thread
        if self._stream is not None:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            while not event.query():  # type: ignore[no-untyped-call]
                if time.monotonic() > deadline_s:
                    raise TransferFailed(f"not done within {limit_s:.3f} s")
                time.sleep(_LOOK_EVERY_S)
        if self._group is None:  # kernels that were aborted look complete
            raise TransferFailed("the pair has ended meanwhile")

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """On a GPU on a stream of its own; a failure ends the pair."""
        if self._group is None:
            raise TransferFailed("the pair has ended")
        try:
            with _failures():
                if self._stream is None:
                    yield
                else:
                    with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
                        yield
        except TransferFailed:
            self.close()
            raise


def _bytes_of(x: torch.Tensor) -> torch.Tensor:
    """The memory of `x` as bytes, because not every library knows every type."""
    return x.view(-1).view(torch.uint8)


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # of torch: a timeout, or a connection that has broken
        raise TransferFailed(str(error).splitlines()[0]) from error


def _abort(held: list[Any]) -> None:
    """End a group of NCCL, also what is queued; held: the last references to it and its store."""
    with contextlib.suppress(RuntimeError):
        held[0].abort()
    held.clear()
