"""Captured graphs without a GPU: what a replay may and may not do, kept to on CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from actors.stage.cuda.graphs import StepOutput

# Operations that wait for the device or whose result's size depends on data: capture forbids them.
_FORBIDDEN = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
}


class NoWaiting(TorchDispatchMode):
    """Raises RuntimeError where a graph could not be captured."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in _FORBIDDEN:
            raise RuntimeError(f"{function} cannot be captured")
        return function(*args, **(kwargs or {}))


class EagerCapture:
    """Runs the very function that was captured, host integers and all, into the same outputs.

    Like a graph it knows only the static buffers: a value read on the host at capture time stays
    as it was. num_captured and num_replays count.
    """

    def __init__(self) -> None:
        self.num_captured = 0
        self.num_replays = 0

    def __call__(self, work: Callable[[], StepOutput]) -> tuple[Callable[[], None], StepOutput]:
        self.num_captured += 1
        with NoWaiting():
            output = work()

        def replay() -> None:
            self.num_replays += 1
            with NoWaiting():
                again = work()
            for name in ("x_TH", "residual_TH", "logits_SV", "tokens_S"):
                kept, new = getattr(output, name), getattr(again, name)
                if kept is not None:
                    kept.copy_(new)

        return replay, output
