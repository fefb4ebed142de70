"""Whole steps of a stage on the GPU against their limits, and the targets they are held to."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from app.bench.ceilings import Ceilings
from app.bench.engine.stage import LoadedStage
from app.bench.engine.steps import StepCase, limit

# (step, largest allowed time over limit). Decodes: 80 % of the measured bandwidth; chunks: 70 % of
# the measured matrix rate; hybrid: 1.2 times the limit.
TARGETS = (
    (StepCase("decode 1 at 1k", 1, 1024), 1 / 0.8),
    (StepCase("decode 32 at 1k", 32, 1024), 1 / 0.8),
    (StepCase("decode 128 at 1k", 128, 1024), 1 / 0.8),
    (StepCase("chunk 512", chunk=512), 1 / 0.7),
    (StepCase("chunk 2048", chunk=2048), 1 / 0.7),
    (StepCase("hybrid 2048 with 64 decodes at 1k", 64, 1024, chunk=1984), 1.2),
)


@dataclass(frozen=True, slots=True)
class GpuStepTime:
    """One kind of step, in milliseconds.

    alone_ms: from plan to tokens on the host. step_ms: from the tokens of one to those of the next,
    when each is launched while the one before it runs, as the engine does; the target is for this.
    """

    model: str
    backend: str
    graphs: bool
    case: str
    alone_ms: float
    step_ms: float
    limit_ms: float
    bound: str
    target_ratio: float

    @property
    def ratio(self) -> float:
        return self.step_ms / self.limit_ms

    @property
    def met(self) -> bool:
        return self.ratio <= self.target_ratio


def time_steps(
    stage: LoadedStage,
    ceilings: Ceilings,
    targets: Sequence[tuple[StepCase, float]] = TARGETS,
    repeats: int = 15,
) -> Iterator[GpuStepTime]:
    """Each (step, target ratio) once warm: medians of `repeats`."""
    for case, target in targets:
        ids = stage.enter(case.shape)
        for _ in range(3):
            stage.step(case.shape, ids)
        alone_s = statistics.median(stage.step(case.shape, ids) for _ in range(repeats))
        step_s = statistics.median(stage.periods(case.shape, ids, repeats))
        stage.leave(ids)
        limit_s, bound = limit(stage, case, ceilings)
        yield GpuStepTime(
            model=stage.spec.model_path.rstrip("/").rpartition("/")[2],
            backend=stage.info.backend,
            graphs=stage.spec.cuda_graphs,
            case=case.name,
            alone_ms=1000 * alone_s,
            step_ms=1000 * step_s,
            limit_ms=1000 * limit_s,
            bound=bound,
            target_ratio=target,
        )
