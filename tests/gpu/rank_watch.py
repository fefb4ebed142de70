"""What a test asks of a rank's process, by `RankPool.call`: what it did, and faults to have."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from actors.scheduling.plan import StepPlan
from actors.stage.cuda.run_ahead import RunAhead
from actors.stage.landing import Landing
from actors.stage.runner import StageRunner
from actors.transport.group import RankGroup

# Each waits for the device, if the tensor is there.
_WAITING = ("cpu", "item", "tolist", "__bool__", "__int__", "__float__")
_COLLECTIVE = ("all_reduce", "gather_all", "broadcast")


@dataclass
class Seen:
    """collectives: name, shape and type of each, in order. ahead: steps launched before their
    turn. num_waits: for a step's tokens. reads: the modules of other operations that would
    wait for a tensor on a device."""

    collectives: list[tuple[str, tuple[int, ...], str]] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)
    num_waits: int = 0
    reads: set[str] = field(default_factory=set)


_seen = Seen()
_originals: list[tuple[type, str, Any]] = []


def watch(runners: Sequence[StageRunner]) -> None:
    """Begin to note what this process does."""
    global _seen
    _seen = Seen()
    if _originals:
        return

    def wrap(owner: type, name: str, note: Callable[..., None], after: bool = False) -> None:
        original = getattr(owner, name)

        def noted(self: Any, *arguments: Any, **options: Any) -> Any:
            if not after:
                note(self, *arguments)
            result = original(self, *arguments, **options)
            if after:
                note(self, *arguments)
            return result

        _originals.append((owner, name, original))
        setattr(owner, name, noted)

    for name in _COLLECTIVE:
        wrap(RankGroup, name, lambda self, x, name=name: _note_collective(name, x))
    for name in _WAITING:
        wrap(torch.Tensor, name, _note_read)
    wrap(Landing, "wait", _note_wait)
    wrap(RunAhead, "_launch", _note_launch, after=True)


def seen(runners: Sequence[StageRunner]) -> Seen:
    """What was noted since `watch`; ends it."""
    while _originals:
        setattr(*_originals.pop())
    return _seen


def _note_collective(name: str, x: torch.Tensor) -> None:
    _seen.collectives.append((name, tuple(x.shape), str(x.dtype)))


def _note_read(tensor: torch.Tensor, *arguments: object) -> None:
    reader = sys._getframe(2).f_globals["__name__"]
    if reader.startswith(("actors.", "kernels.")):  # not Triton's interpreter
        _seen.reads.add(reader)


def _note_wait(landing: Landing) -> None:
    _seen.num_waits += 1


def _note_launch(ahead: RunAhead, *arguments: object) -> None:
    if ahead._launched is not None:
        _seen.ahead.append(ahead._launched.step_id)


def overflow(runners: Sequence[StageRunner], rank: int, overflows: bool) -> None:
    """From now on this rank's logits are not finite, or are again as they were."""
    runner = runners[0]
    if runner.spec.rank != rank:
        return
    decoder: Any = runner._decoder
    vars(decoder).pop("sharded_logits", None)
    if overflows:
        original = decoder.sharded_logits
        decoder.sharded_logits = lambda normed_RH: original(normed_RH).fill_(torch.nan)


def refuse_masks(runners: Sequence[StageRunner], refuses: bool) -> None:
    """From now on rank 0 cannot adjust logits, or can again."""
    sampler: Any = runners[0]._sampler
    if sampler is None:
        return
    vars(sampler).pop("adjust", None)
    if refuses:

        def adjust(*arguments: object) -> None:
            raise ValueError("no mask today")

        sampler.adjust = adjust


def execute_another(
    runners: Sequence[StageRunner], plan: StepPlan, upcoming: StepPlan, other: StepPlan
) -> str:
    """Launch `upcoming` ahead of its turn, but execute `other` then; its error."""
    runners[0].execute(plan, None, lambda wait_s: upcoming)
    try:
        runners[0].execute(other, None)
    except RuntimeError as failure:
        return str(failure)
    return ""
