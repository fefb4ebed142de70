"""What the KV cache of a GPU may take: measured beside the graphs and the largest step."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: the GPU backends need it")

from actors.scheduling.request import SamplingParams
from actors.stage.cuda.graphs import StepOutput, capture_on_gpu
from actors.stage.head import samples_locally
from actors.stage.input_batch import InputBatch
from actors.stage.models.decoder import Decoder
from actors.stage.profile import plans_to_measure
from actors.stage.runner import StageRunner
from actors.stage.spec import StageSpec
from kernels.interface import Batch
from kernels.packing import QUANTIZATIONS
from kernels.triton.tiles import most_fused_tokens, packed_tile, rounded_tile
from tests.actors.stage.greedy_reference import make_prompts
from tests.actors.stage.mini_planner import MiniPlanner, chain
from tests.gpu.captures import EagerCapture
from tests.gpu.two_layers import expected

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="interpreted kernels; see test_gpu_stage"
)
LENGTHS = (1, 3, 13)
TOKENS = 3


class FakeMemory:
    """A device of `total` bytes, of which every captured graph keeps `of_graph`, and another
    process `of_neighbour`."""

    def __init__(self, total: int, of_graph: int, of_neighbour: int = 0) -> None:
        self.total, self.of_graph, self.of_neighbour = total, of_graph, of_neighbour
        self.num_graphs = 0
        self.steps: list[tuple[int, int]] = []  # tokens and slices of each pass over the layers

    def peak_bytes(self, work: Callable[[], object]) -> int:
        assert not self.num_graphs, "the step runs launch by launch, before the graphs"
        work()
        return 1000 * len(self.steps)

    def free_bytes(self) -> tuple[int, int]:
        return self.total - self.of_neighbour - self.held_bytes(), self.total

    def held_bytes(self) -> int:
        return self.of_graph * self.num_graphs


@pytest.mark.parametrize("stage", [0, 1])
def test_graphs_and_the_largest_step_come_before_the_cache(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    memory, layers = FakeMemory(10_000_000, 500, 4_000_000), Decoder.layers
    eager = EagerCapture()

    def watched(self: Decoder, x_TH: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, ...]:
        memory.steps.append((len(x_TH), len(batch.starts_S)))
        return layers(self, x_TH, batch)

    def capture(work: Callable[[], StepOutput]) -> tuple[Callable[[], None], StepOutput]:
        memory.num_graphs += 1
        return eager(work)

    runner = StageRunner(
        StageSpec(
            str(tiny_model("llama")), backend="triton", num_threads=1, block_size=4, stage=stage,
            num_stages=2, max_requests=4, max_model_len=64, max_step_tokens=96, graph_tokens=32,
        )
    )  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "layers", watched)
        room = runner.profile(memory, capture)
    num_graphs = 3 + 2  # decodes of 1, 2 and 4; hybrids of 16 and 32
    assert memory.num_graphs == num_graphs
    assert memory.steps[0] == (96, 4)
    own_bytes = 500 * num_graphs + 1000
    assert room == (6_000_000 - own_bytes, 10_000_000, own_bytes)


@pytest.mark.long
def test_a_profiled_stage_gives_the_tokens_of_transformers(
    tiny_model: Callable[..., Path],
) -> None:
    runner = StageRunner(
        StageSpec(
            str(tiny_model("llama")), backend="triton", num_threads=1, block_size=4,
            max_requests=4, max_model_len=64, max_step_tokens=64, graph_tokens=16,
        )
    )  # fmt: skip
    runner.profile(FakeMemory(1 << 30, 0), EagerCapture())
    with pytest.raises(RuntimeError, match="allocate the KV cache"):
        MiniPlanner(chain([runner])).run([[1, 2]], SamplingParams(max_tokens=1))
    runner.allocate(256)
    capture = EagerCapture()
    runner.capture(capture)
    planner = MiniPlanner(chain([runner]), chunk=8, budget=24)
    answers = planner.run(make_prompts(LENGTHS), SamplingParams(max_tokens=TOKENS))
    assert answers == [answer[:TOKENS] for answer in expected("llama", LENGTHS)]
    assert capture.num_replays > 0


def test_results_of_all_sizes_lie_in_one_place(tiny_model: Callable[..., Path]) -> None:
    """A graph keeps what it returns: results of their own would hold a vocabulary's width of
    memory for every row of every size."""
    outputs: list[StepOutput] = []
    eager = EagerCapture()

    def capture(work: Callable[[], StepOutput]) -> tuple[Callable[[], None], StepOutput]:
        replay, output = eager(work)
        outputs.append(output)
        return replay, output

    runner = StageRunner(
        StageSpec(
            str(tiny_model("llama")), backend="triton", num_threads=1, block_size=4,
            max_requests=4, max_model_len=64, graph_tokens=32,
        )
    )  # fmt: skip
    runner.allocate(16)
    runner.capture(capture)
    assert len(outputs) == 5
    for name in ("x_TH", "residual_TH", "logits_SV", "tokens_S"):
        assert len({getattr(output, name).data_ptr() for output in outputs}) == 1, name


def test_libraries_see_one_side_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS keeps a workspace of tens of megabytes per stream it was called on."""
    used: list[object] = []

    class Stream:
        def wait_stream(self, other: object) -> None: ...

    class Using:
        def __init__(self, *arguments: object, stream: object = None, **others: object) -> None:
            used.append(stream or arguments[0])

        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> None: ...

    class Graph:
        def replay(self) -> None: ...

    for name, fake in (
        ("Stream", Stream),
        ("stream", Using),
        ("graph", Using),
        ("CUDAGraph", Graph),
        ("current_stream", Stream),
        ("graph_pool_handle", object),
    ):
        monkeypatch.setattr(torch.cuda, name, fake)
    capture = capture_on_gpu()
    for _ in range(3):
        capture(lambda: StepOutput(torch.zeros(1), torch.zeros(1)))
    assert len(used) == 6  # once to warm up, once to capture
    assert len(set(used)) == 1


@pytest.mark.parametrize("max_step_tokens", [128, 8192])
def test_every_variant_of_products_is_compiled_by_a_measured_step(max_step_tokens: int) -> None:
    """Of a step that is not captured, too: no request waits for a compiler."""
    spec = StageSpec("", device="cuda", max_requests=64, max_step_tokens=max_step_tokens)
    measured = [plan.num_tokens for plan in plans_to_measure(spec, 4096)]
    for kind in QUANTIZATIONS:
        for dtype in (torch.bfloat16, torch.float32):
            fused = range(1, most_fused_tokens(dtype) + 1)
            tiles = {packed_tile(n, kind, dtype) for n in measured if n in fused}
            assert {packed_tile(n, kind, dtype) for n in fused} == tiles
    assert {rounded_tile(n) for n in range(1, 300)} == {rounded_tile(n) for n in measured}


def test_a_measured_step_draws_from_shards_and_from_whole_rows() -> None:
    """Both kinds of rows have kernels of their own where ranks divide the vocabulary."""
    batch = InputBatch(4, 64, 16)
    spec = StageSpec("", device="cuda", max_requests=4, max_step_tokens=64)
    plan = plans_to_measure(spec, 64)[-1]
    batch.apply(plan)
    host = batch.gather(plan.slices)
    alone_S = samples_locally(batch.columns, host.rows_S, host.ends_S.astype(np.int64))
    assert alone_S.any()
    assert not alone_S.all()
