"""Pinned memory for a step's tokens from the device, and waits for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Landing:
    """Tokens on their way to the host. event: when they, and all that was queued before them, are
    here; None on CPU, where they are."""

    place_S: torch.Tensor
    event: torch.cuda.Event | None

    def is_done(self) -> bool:
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> torch.Tensor:
        """The tokens, on the host."""
        if self.event is not None:
            self.event.synchronize()
        return self.place_S


class TokenLanding:
    """Places for the tokens of two steps: one is read while the next arrives."""

    def __init__(self, max_requests: int, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._places = [
            torch.zeros(max_requests, dtype=torch.int32, pin_memory=self._on_gpu) for _ in range(2)
        ]

    def fetch(self, tokens_S: torch.Tensor) -> Landing:
        """Start copying them back."""
        self._places.reverse()
        place_S = self._places[0][: len(tokens_S)]
        place_S.copy_(tokens_S, non_blocking=True)
        return Landing(place_S, _recorded() if self._on_gpu else None)


def await_queue(device: torch.device) -> None:
    """Return when all that is queued on the device's current stream is done."""
    if device.type == "cuda":
        _recorded().synchronize()


def _recorded() -> torch.cuda.Event:
    # Waiting sleeps, because spinning would take a core from the scheduler.
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
