"""Pinned memory where a step's tokens arrive from the device."""

from __future__ import annotations

from collections.abc import Callable

import torch


class TokenLanding:
    """Pinned memory for the tokens of two steps: one is read while the next arrives."""

    def __init__(self, max_requests: int, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._places = [
            torch.zeros(max_requests, dtype=torch.int32, pin_memory=self._on_gpu) for _ in range(2)
        ]

    def fetch(self, tokens_S: torch.Tensor) -> Callable[[], torch.Tensor]:
        self._places.reverse()
        place_S = self._places[0][: len(tokens_S)]
        place_S.copy_(tokens_S, non_blocking=True)
        if not self._on_gpu:
            return lambda: place_S
        landed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        landed.record()

        def wait() -> torch.Tensor:
            landed.synchronize()
            return place_S

        return wait
