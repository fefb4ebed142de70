"""Whole stages on the GPU backends: tokens equal to transformers, captured or not.

Without a GPU the kernels run interpreted and graphs as in `tests.gpu.captures`; with one, the
tests marked `gpu` capture real graphs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: the GPU backends need it")

from actors.scheduling.request import SamplingParams
from actors.stage.cuda.graphs import TILE, decode_sizes, hybrid_sizes
from actors.stage.models.config import ModelError
from actors.stage.runner import StageRunner
from kernels.flash import library
from tests import tiny_adapters
from tests.actors.stage.greedy_reference import make_prompts
from tests.actors.stage.mini_planner import MiniPlanner, chain, make_runner
from tests.actors.stage.weights import packed_folders
from tests.gpu.captures import EagerCapture
from tests.gpu.two_layers import LAYERS, expected
from tests.kernels.flash.fake_flash3 import FakeFlash3
from tests.kernels.flash.fake_flash_attn import FakeFlash

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
LENGTHS = (1, 3, 13)
TOKENS = 3  # two steps with chunks, one of three decodes, which is padded, and one of one
# Hybrid steps of all tests fit the one captured size; capturing a second takes as long again.
SMALL = {"max_requests": 4, "graph_tokens": 16, "max_model_len": 64}
GREEDY = SamplingParams(max_tokens=TOKENS)


def greedy(variant: str) -> list[list[int]]:
    return [answer[:TOKENS] for answer in expected(variant, LENGTHS)]


def captured(runner: StageRunner) -> tuple[StageRunner, EagerCapture]:
    capture = EagerCapture()
    runner.capture(capture)
    return runner, capture


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU the tests marked gpu do this for real")
@pytest.mark.parametrize("variant", ["mistral", "qwen3", "llama-head-dim"])
def test_tokens_of_transformers(tiny_model: Callable[..., Path], variant: str) -> None:
    runner = make_runner(tiny_model(variant), backend="triton", **SMALL)
    planner = MiniPlanner(chain([runner]), chunk=8, budget=24)
    assert planner.run(make_prompts(LENGTHS), GREEDY) == greedy(variant)
    assert planner.num_hybrid_steps > 1


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU the tests marked gpu do this for real")
@pytest.mark.parametrize(
    ("variant", "graph_tokens"),
    [
        pytest.param("mistral", 32, marks=pytest.mark.long),
        pytest.param("mixtral", 16, marks=pytest.mark.long),
        ("gpt-oss", 16),
    ],
)
def test_captured_steps_give_the_same_tokens(
    tiny_model: Callable[..., Path], variant: str, graph_tokens: int
) -> None:
    spec = {**SMALL, "backend": "triton", "graph_tokens": graph_tokens}
    runner, capture = captured(make_runner(tiny_model(variant), **spec))
    planner = MiniPlanner(chain([runner]), chunk=8, budget=24)
    assert planner.run(make_prompts(LENGTHS), GREEDY) == greedy(variant)
    assert planner.num_hybrid_steps > 1
    work = [result for result in planner.results if result.tokens]
    assert capture.num_replays >= len(work)


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU the tests marked gpu do this for real")
@pytest.mark.parametrize(
    "method", [*(pytest.param(m, marks=pytest.mark.long) for m in ("gptq", "gptq-8")), "awq"]
)
def test_captured_steps_of_packed_weights(tmp_path: Path, method: str) -> None:
    """The tokens of torch, which holds the same numbers; no weight is made dense when loaded."""
    packed_folders.write(tmp_path, method)
    runner, capture = captured(make_runner(tmp_path, backend="triton", **SMALL))
    answers = MiniPlanner(chain([runner]), chunk=8, budget=24).run(make_prompts(LENGTHS), GREEDY)
    reference = MiniPlanner(chain([make_runner(tmp_path, **SMALL)]), chunk=8, budget=24)
    assert answers == reference.run(make_prompts(LENGTHS), GREEDY)
    assert capture.num_replays > 0


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU the tests marked gpu do this for real")
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_experts_are_captured(tiny_model: Callable[..., Path], quantization: str) -> None:
    spec = {**SMALL, "backend": "triton", "quantization": quantization}
    _, capture = captured(make_runner(tiny_model("mixtral"), **spec))
    assert capture.num_captured > 0


@pytest.mark.long
@pytest.mark.skipif(not INTERPRETED, reason="on a GPU the tests marked gpu do this for real")
def test_captured_stages_hand_hidden_states_on(tiny_model: Callable[..., Path]) -> None:
    runners = [
        captured(make_runner(tiny_model("llama"), backend="triton", num_stages=2, stage=s, **SMALL))
        for s in range(2)
    ]
    planner = MiniPlanner(chain([r for r, _ in runners]), chunk=8, budget=24, feeds=True)
    assert planner.run(make_prompts(LENGTHS), GREEDY) == greedy("llama")
    assert runners[0][1].num_replays == runners[1][1].num_replays > 0


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU the tests marked gpu do this for real")
def test_captured_draws_are_those_of_torch(tiny_model: Callable[..., Path]) -> None:
    """Drawn in the graph where the logits are used as they are, after it where not."""
    each = [
        SamplingParams(TOKENS, temperature=0.9, top_p=0.8, seed=3),
        SamplingParams(TOKENS, temperature=1.1, top_k=9, seed=5, presence_penalty=1.5),
        SamplingParams(TOKENS, temperature=0.7, min_p=0.1, seed=9, logprobs=2),
    ]
    torch_planner = MiniPlanner(
        chain([make_runner(tiny_model("llama"), **SMALL)]), chunk=8, budget=24
    )
    runner, _ = captured(make_runner(tiny_model("llama"), backend="triton", **SMALL))
    planner = MiniPlanner(chain([runner]), chunk=8, budget=24)
    assert planner.run(make_prompts(LENGTHS), each) == torch_planner.run(
        make_prompts(LENGTHS), each
    )
    logprobs = [e for result in planner.results for _, e in result.logprobs]
    reference = [e for result in torch_planner.results for _, e in result.logprobs]
    assert len(logprobs) == len(reference) == TOKENS
    for ours, theirs in zip(logprobs, reference, strict=True):
        assert ours.token == theirs.token
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU the tests marked gpu do this for real")
def test_steps_beyond_the_captured_sizes_run_uncaptured(tiny_model: Callable[..., Path]) -> None:
    runner, capture = captured(
        make_runner(
            tiny_model("llama"), backend="triton", max_requests=2, max_model_len=64,
            graph_tokens=0,
        )
    )  # fmt: skip
    planner = MiniPlanner(chain([runner]), chunk=64, budget=64)
    assert planner.run(make_prompts(LENGTHS), GREEDY) == greedy("llama")
    decodes_only = planner.results[planner.num_hybrid_steps :]
    assert 0 < capture.num_replays < len(planner.results)
    assert len(decodes_only) > capture.num_replays  # batches of 3 exceed max_requests


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU the tests marked gpu do this for real")
def test_steps_with_adapters_are_captured(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """In graphs of their own, which those without do not use; a slot that is filled anew is read by
    the same graphs. All give the tokens of merged weights."""
    model = {"num_hidden_layers": LAYERS}
    first, second = (
        tiny_adapters.write(tmp_path / str(seed), seed=seed, model=model) for seed in (1, 2)
    )
    runner = make_runner(tiny_model("llama"), backend="triton", max_adapters=2,
                         max_adapter_rank=10, **SMALL)  # fmt: skip
    runner, capture = captured(runner)
    assert capture.num_captured == 2 * (len(decode_sizes(4)) + len(hybrid_sizes(16)))
    runner.load_adapter(0, first)
    runner.load_adapter(1, second)
    answers = [expected("llama"), *(tiny_adapters.expected(f, **model) for f in (first, second))]
    two = SamplingParams(max_tokens=2)  # of a prompt, and of a decode that reads what it wrote
    for number in range(3):
        assert len({tuple(answer[number][:2]) for answer in answers}) == 3
    for swapped, wanted in ((False, (1, 0, 2)), (True, (2, 0, 0)), (False, (0, 0, 0))):
        if swapped:
            runner.load_adapter(1, first)
            runner.load_adapter(0, second)
        planner = MiniPlanner(chain([runner]), chunk=8, budget=24)
        used = [3 - slot if swapped and slot else slot for slot in wanted]
        before = capture.num_replays
        assert planner.run(make_prompts()[:3], two, adapters=used) == [
            answers[adapter][number][:2] for number, adapter in enumerate(wanted)
        ]
        work = sum(bool(result.tokens) for result in planner.results)
        assert capture.num_replays - before >= work


@pytest.mark.skipif(not INTERPRETED, reason="flash-attn itself is tested on the GPU")
@pytest.mark.parametrize("capture", [False, True])
def test_flash_attention_stage(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capture: bool
) -> None:
    """Tokens of backend `torch` in half precision; hybrid batches are never captured."""
    fake = FakeFlash()
    monkeypatch.setattr(library, "load", lambda: fake.library)
    spec = {**SMALL, "dtype": "float16", "block_size": 256, "max_model_len": 256}
    runner = make_runner(tiny_model("llama"), 8, backend="flash_attn", **spec)
    replays = captured(runner)[1] if capture else None
    planner = MiniPlanner(chain([runner]), 8, 256, chunk=8, budget=24)
    torch_planner = MiniPlanner(
        chain([make_runner(tiny_model("llama"), 8, **spec)]), 8, 256, chunk=8, budget=24
    )
    assert planner.run(make_prompts(LENGTHS), GREEDY) == torch_planner.run(
        make_prompts(LENGTHS), GREEDY
    )
    assert {name for name, _, _ in fake.calls} == {"varlen", "with_kvcache"}
    if replays is not None:
        assert 0 < replays.num_replays <= len(planner.results) - planner.num_hybrid_steps


@pytest.mark.skipif(not INTERPRETED, reason="FlashAttention-3 itself runs on Hopper GPUs")
@pytest.mark.parametrize("variant", ["llama", "mistral"])
def test_flash_attention_3_stage(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    """Tokens of backend `torch` in half precision, with every step captured; mistral's layers have
    a window."""
    fake = FakeFlash3()
    monkeypatch.setattr(library, "load", lambda: fake.library)
    spec = {**SMALL, "dtype": "float16", "graph_tokens": 32}
    runner, capture = captured(make_runner(tiny_model(variant), backend="flash_attn", **spec))
    planner = MiniPlanner(chain([runner]), chunk=8, budget=24)
    torch_planner = MiniPlanner(
        chain([make_runner(tiny_model(variant), **spec)]), chunk=8, budget=24
    )
    assert planner.run(make_prompts(LENGTHS), GREEDY) == torch_planner.run(
        make_prompts(LENGTHS), GREEDY
    )
    assert planner.num_hybrid_steps > 1
    assert capture.num_replays == len(planner.results)
    # One schedule a pass, captures included, and one call for each of the three layers.
    assert len(fake.calls) == LAYERS * len(fake.schedules)
    assert len(fake.schedules) == capture.num_captured + capture.num_replays


def test_a_float8_cache_needs_a_backend_that_reads_it(tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(ModelError, match=r"^kv.dtype: backend 'torch' has no 'fp8'"):
        make_runner(tiny_model("llama"), kv_dtype="fp8")


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU the tests marked gpu do this for real")
def test_a_float8_cache_halves_the_blocks_and_keeps_most_tokens(
    tiny_model: Callable[..., Path],
) -> None:
    runner = make_runner(tiny_model("llama"), backend="triton", kv_dtype="fp8", **SMALL)
    planner = MiniPlanner(chain([runner]), chunk=32, budget=64)
    answers = planner.run(make_prompts(LENGTHS), SamplingParams(max_tokens=1))
    same = [a[0] == b[0] for a, b in zip(answers, greedy("llama"), strict=True)]
    assert sum(same) >= 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize(
    "variant", ["llama", "mistral", "qwen3", "llama-head-dim", "mixtral", "gpt-oss"]
)
def test_tokens_of_transformers_on_the_gpu(
    tiny_model: Callable[..., Path], variant: str, graphs: bool
) -> None:
    runner = make_runner(
        tiny_model(variant),
        backend="triton",
        device="cuda",
        max_requests=4,
        graph_tokens=64,
        cuda_graphs=graphs,
    )
    planner = MiniPlanner(chain([runner]), chunk=8, budget=24)
    assert planner.run(make_prompts(LENGTHS), GREEDY) == greedy(variant)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("backend", ["triton", "flash_attn"])
def test_half_precision_on_the_gpu(
    tiny_model: Callable[..., Path], backend: str, num_stages: int
) -> None:
    """Both GPU backends against `torch`, one stage or two that hand hidden states on."""
    if backend == "flash_attn":
        try:
            library.load()
        except ImportError as missing:
            pytest.skip(str(missing))
    spec = {"dtype": "float16", "block_size": 256, "max_requests": 4, "device": "cuda"}

    def answers(name: str) -> list[list[int]]:
        runners = [
            make_runner(
                tiny_model("llama"), 8, backend=name, num_stages=num_stages, stage=s, **spec
            )
            for s in range(num_stages)
        ]
        planner = MiniPlanner(chain(runners), 8, 256, chunk=8, budget=24, feeds=num_stages > 1)
        return planner.run(make_prompts(LENGTHS), GREEDY)

    assert answers(backend) == answers("torch")


def test_sizes_are_fine_where_padding_is_dear_and_whole_tiles_above() -> None:
    assert decode_sizes(1) == [1]
    assert decode_sizes(30) == [1, 2, 4, 8, 16, 24, 30]
    assert decode_sizes(128)[-5:] == [64, 80, 96, 112, 128]
    assert hybrid_sizes(0) == []
    assert hybrid_sizes(300) == [16, 32, 64, TILE, 2 * TILE]
    assert hybrid_sizes(2048)[-1] == 2048
    for wanted in range(64, 129):  # no decode step is padded by more than a quarter
        size = min(s for s in decode_sizes(128) if s >= wanted)
        assert size <= 1.25 * wanted
