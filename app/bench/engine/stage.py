"""One loaded stage in this process, on which steps of any composition are timed. No Ray."""

from __future__ import annotations

import itertools
import json
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actors.scheduling.plan import RequestStart, Slice, SliceRow, StepPlan, StepShape
from actors.scheduling.request import SamplingParams
from actors.stage.models.read import load_config
from actors.stage.runner import StageRunner
from actors.stage.spec import StageSpec

BLOCK_SIZE = 16
_FOR_MEMORY_S = 60.0
DEFAULT_SHAPE = Path("configs/models/shapes/llama-135m")


class LoadedStage:
    """The whole model as one stage; random weights unless `load_format` is "auto"."""

    def __init__(
        self,
        model: Path,
        *,
        load_format: str = "dummy",
        dtype: str = "bfloat16",
        quantization: str = "none",
        backend: str = "cpu",
        threads: int = 0,
        max_requests: int = 64,
        max_step_tokens: int = 4096,
        kv_tokens: int = 64 * 4096,
        device: str = "cpu",
        block_size: int = BLOCK_SIZE,
        max_model_len: int | None = None,
        cuda_graphs: bool = True,
        max_adapters: int = 0,
        max_adapter_rank: int = 0,
        draft_model: Path | None = None,
        max_drafts: int = 0,
    ) -> None:
        self.config: dict[str, Any] = json.loads((model / "config.json").read_text())
        self.description = load_config(model)
        self.spec = StageSpec(
            model_path=str(model),
            load_format=load_format,
            dtype=dtype,
            quantization=quantization,
            backend=backend,
            device=device,
            block_size=block_size,
            max_requests=max_requests,
            max_model_len=max_model_len or int(self.config["max_position_embeddings"]),
            max_step_tokens=max_step_tokens,
            num_threads=threads,
            cuda_graphs=cuda_graphs,
            max_adapters=max_adapters,
            max_adapter_rank=max_adapter_rank,
            draft_model_path=None if draft_model is None else str(draft_model),
            max_drafts=max_drafts,
        )
        self.kv_tokens = kv_tokens
        self.runner = StageRunner(self.spec)
        self.info = self.runner.info
        self.runner.allocate(kv_tokens // block_size + max_requests)
        self.runner.wait_for_memory(_FOR_MEMORY_S)
        self._next_request = 0
        self._next_step = 0

    def enter(self, shape: StepShape, adapters: Sequence[int] = ()) -> list[int]:
        """Enter the requests of a step; their KV is whatever memory holds, which costs the same.
        adapters: of each, as of `RequestStart`; none where there are fewer."""
        started, ids, block = [], [], 0
        context = shape.decode_context_tokens // max(1, shape.num_decodes)
        lengths = [context] * shape.num_decodes + [s + n for s, n in shape.prefills]
        for number, length in enumerate(lengths):
            count = -(-(length + 1) // self.spec.block_size)
            self._next_request += 1
            ids.append(self._next_request)
            tokens = tuple((7 * i + self._next_request) % 4000 for i in range(length))
            blocks = tuple(range(block, block + count))
            sampling = SamplingParams(max_tokens=10_000)
            adapter = adapters[number] if number < len(adapters) else 0
            started.append(
                RequestStart(self._next_request, tokens, length, blocks, sampling, adapter=adapter)
            )
            block += count
        self._execute((), started=tuple(started))
        return ids

    def step(self, shape: StepShape, ids: Sequence[int]) -> float:
        """Seconds of one step; repeated at the same positions (steps are idempotent)."""
        slices = _slices(shape, ids)
        begin = time.perf_counter()
        self._execute(slices)
        return time.perf_counter() - begin

    def periods(self, shape: StepShape, ids: Sequence[int], count: int) -> list[float]:
        """Seconds from the tokens of one step to those of the next, `count` times, as an engine of
        one stage runs them: on a GPU each is launched while the one before it runs."""
        slices = _slices(shape, ids)
        plans = [StepPlan(self._next_step + i, slices) for i in range(count + 1)]
        self._next_step += len(plans)
        ends, waiting = [], deque(plans)
        while waiting:
            self.runner.execute(waiting.popleft(), None, lambda wait_s: next(iter(waiting), None))
            ends.append(time.perf_counter())
        return [end - begin for begin, end in itertools.pairwise(ends)]

    def leave(self, ids: Sequence[int]) -> None:
        self._execute((), released=tuple(ids))

    def time_once(self, shape: StepShape) -> float:
        """Enter, run once to touch the memory, time twice, leave; the faster of the two."""
        ids = self.enter(shape)
        self.step(shape, ids)
        seconds = min(self.step(shape, ids) for _ in range(2))
        self.leave(ids)
        return seconds

    def close(self) -> None:
        """Release weights and cache; the stage is unusable afterwards."""
        self.runner.close()
        del self.runner

    def _execute(self, slices: tuple[SliceRow, ...], **changes: Any) -> None:
        self.runner.execute(StepPlan(self._next_step, slices, **changes), None)
        self._next_step += 1


def _slices(shape: StepShape, ids: Sequence[int]) -> tuple[SliceRow, ...]:
    context = shape.decode_context_tokens // max(1, shape.num_decodes)
    slices: list[SliceRow] = [Slice(i, context - 1, 1, True) for i in ids[: shape.num_decodes]]
    for request_id, (start, count) in zip(ids[shape.num_decodes :], shape.prefills, strict=True):
        slices.append(Slice(request_id, start, count, True))
    return tuple(slices)
