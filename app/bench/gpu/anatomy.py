"""Host time of a step: Python's time from packed plan to packed answer, without a device.

The stage is the real one but for what it calls: graphs replay nothing, and every token drawn is 1.
What is left is the host's own work, which bounds how short a step can be. Needs no GPU.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from actors.scheduling.plan import RequestStart, Slice, StepPlan, StepResult
from actors.scheduling.request import SamplingParams
from actors.stage.cuda.graphs import StepOutput
from actors.stage.runner import StageRunner
from actors.stage.spec import StageSpec
from actors.transport.messages import pack, unpack
from kernels.all_reduce import AllReduce
from kernels.graph_support import GraphSupport
from kernels.interface import AttentionShape, DecoderStack, KVLayer
from kernels.layer_form import LayerForm
from kernels.layer_weights import LayerWeights
from kernels.torch.backend import TorchBackend
from kernels.torch.sampling import gather_logprobs

TraceFunction = Callable[[FrameType, str, object], Any]
BATCHES = (1, 32, 64, 128)
LIMIT_US = {64: 250.0}  # what a step of so many decodes may cost the host
_CONTEXT = 1024
_BLOCK_SIZE = 16
_MAX_MODEL_LEN = 8192
_VOCABULARY = 128_256

SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=_MAX_MODEL_LEN),
    "top-p": SamplingParams(max_tokens=_MAX_MODEL_LEN, temperature=0.8, top_p=0.9, seed=7),
}


@dataclass(frozen=True, slots=True)
class StepAnatomy:
    """Decodes of one batch size, captured and launched ahead; per step.

    host_us: median of Python's time. num_replays: launches of a graph. num_operations: torch's
    operations beside them, each a launch or a copy; bytes_copied: what copies between host and
    device move. num_instructions: those of Python, which beside the time say how a step's work
    grows with its rows.
    """

    sampling: str
    num_decodes: int
    host_us: float
    num_replays: float
    num_operations: float
    bytes_copied: float
    num_instructions: float

    @property
    def met(self) -> bool:
        return self.host_us <= LIMIT_US.get(self.num_decodes, float("inf"))


def anatomy(batches: Sequence[int] = BATCHES, num_steps: int = 200) -> Iterator[StepAnatomy]:
    """Measure every batch size with every kind of sampling."""
    with tempfile.TemporaryDirectory() as folder:
        _write_shape(Path(folder))
        for sampling in SAMPLINGS:
            for num_decodes in batches:
                yield _measure(Path(folder), sampling, num_decodes, num_steps)


class _Backend(TorchBackend):
    """Layers that compute nothing, draws of 1; packs draws as the GPU backends do."""

    name = "anatomy"

    def decoder_stack(
        self,
        layers: Sequence[LayerWeights],
        kv: Sequence[KVLayer],
        cos_sin_PD: torch.Tensor,
        shape: AttentionShape,
        form: LayerForm,
        all_reduce: AllReduce | None = None,
    ) -> DecoderStack | None:
        return lambda x_TH, residual_TH, batch: (x_TH, torch.zeros_like(x_TH))

    def graph_support(self) -> GraphSupport | None:
        from kernels.triton.sampling import pack_rows

        return GraphSupport(True, pack_rows, self._draw, gather_logprobs, lambda experts: False)

    def _draw(
        self, logits_SV: torch.Tensor, packed_S3: torch.Tensor, first_id: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_rows = len(logits_SV)
        return torch.zeros(num_rows, dtype=torch.float64), torch.ones(num_rows, dtype=torch.int32)


class _Replays:
    """A graph that runs once at capture and does nothing at replay: outputs stay the same."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, work: Callable[[], StepOutput]) -> tuple[Callable[[], None], StepOutput]:
        output = work()
        if output.tokens_S is not None:
            output.tokens_S.fill_(1)
        return self._replay, output

    def _replay(self) -> None:
        self.count += 1


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts torch operations and the bytes of copies."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0
        self.bytes_copied = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not function.is_view:
            self.count += 1
        if function is torch.ops.aten.copy_.default:
            self.bytes_copied += args[0].nbytes
        return function(*args, **(kwargs or {}))


class _Instructions:
    """Counts the instructions that Python executes, in its own functions and those they call."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> _Instructions:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, argument: object) -> TraceFunction:
        frame.f_trace_opcodes = True
        self.count += event == "opcode"
        return self._trace


def _measure(folder: Path, sampling: str, num_decodes: int, num_steps: int) -> StepAnatomy:
    replays = _Replays()
    runner = _runner(folder, num_decodes, replays)
    counted, warm = 20, num_steps // 2
    total = warm + num_steps + 2 * counted + 1  # and the one that the last is launched ahead of
    plans = [pack(plan) for plan in _plans(num_decodes, SAMPLINGS[sampling], total)]
    walk = _Walk(runner, plans)
    for _ in range(warm):
        walk.step()
    gc.collect()
    gc.freeze()
    try:
        times = [walk.step() for _ in range(num_steps)]
    finally:
        gc.unfreeze()
    replays.count = 0
    with _Operations() as operations:
        for _ in range(counted):
            walk.step()
    num_replays = replays.count
    with _Instructions() as instructions:
        for _ in range(counted):
            walk.step()
    return StepAnatomy(
        sampling,
        num_decodes,
        1e6 * statistics.median(times),
        num_replays / counted,
        operations.count / counted,
        operations.bytes_copied / counted,
        instructions.count / counted,
    )


class _Walk:
    """Runs plans through a runner, as the stage actor does."""

    def __init__(self, runner: StageRunner, packed: Sequence[bytes]) -> None:
        self._runner, self._packed = runner, packed
        self._next = 0
        self._seen: StepPlan | None = None

    def step(self) -> float:
        """Seconds from the packed plan to the packed answer."""
        begin = time.perf_counter()
        plan = self._seen or unpack(StepPlan, self._packed[self._next])
        self._next, self._seen = self._next + 1, None
        result = self._runner.execute(plan, None, self._following)
        assert isinstance(result, StepResult)
        pack(result)
        return time.perf_counter() - begin

    def _following(self, wait_s: float) -> StepPlan:
        self._seen = unpack(StepPlan, self._packed[self._next])
        return self._seen


def _runner(folder: Path, num_decodes: int, replays: _Replays) -> StageRunner:
    from kernels import registry

    # Known for as long as it takes to load: no backend to serve with.
    registry.BACKENDS["anatomy"] = registry.BackendEntry(f"{__name__}:_Backend", ("cpu",))
    try:
        runner = StageRunner(
            StageSpec(
                str(folder), load_format="dummy", dtype="float32", backend="anatomy",
                block_size=_BLOCK_SIZE, max_requests=max(128, num_decodes),
                max_model_len=_MAX_MODEL_LEN, graph_tokens=0,
            )
        )  # fmt: skip
    finally:
        del registry.BACKENDS["anatomy"]
    runner.allocate(1)
    runner.capture(replays)
    return runner


def _plans(num_decodes: int, sampling: SamplingParams, count: int) -> Iterator[StepPlan]:
    """Decodes that go on step after step; the first plan starts them."""
    num_blocks = -(-_CONTEXT // _BLOCK_SIZE)
    rng = np.random.default_rng(0)
    started = tuple(
        RequestStart(
            i, tuple(rng.integers(_VOCABULARY, size=_CONTEXT).tolist()), _CONTEXT,
            tuple(range(num_blocks)), sampling,
        )
        for i in range(num_decodes)
    )  # fmt: skip
    for step in range(count):
        position = _CONTEXT - 1 + step
        grown: tuple[tuple[int, tuple[int, ...]], ...] = ()
        if step and position % _BLOCK_SIZE == 0:
            grown = tuple((i, (0,)) for i in range(num_decodes))
        yield StepPlan(
            step,
            tuple(Slice(i, position, 1, True) for i in range(num_decodes)),
            started=() if step else started,
            new_blocks=grown,
        )


def _write_shape(folder: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": _VOCABULARY,
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 1, "num_key_value_heads": 1, "rms_norm_eps": 1e-5,
        "max_position_embeddings": _MAX_MODEL_LEN, "hidden_act": "silu",
        "tie_word_embeddings": True, "torch_dtype": "float32", "rope_theta": 10_000.0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
