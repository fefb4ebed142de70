"""Launches within CUDA's limits: grids of the largest shapes that models have, and memory."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be tested")

import triton
from triton.runtime.interpreter import InterpretedFunction

from app.bench.gpu import checks
from app.bench.gpu.adapter_checks import AdapterCase, adapter_inputs
from app.bench.gpu.checks import AttentionCase, ExpertCase
from app.bench.gpu.recurrence_checks import RecurrenceCase, recurrence_inputs, run_recurrence
from app.bench.gpu.reduce_checks import draw, make_ranks
from kernels.all_reduce import PEER_ROWS
from kernels.packing import QUANTIZATIONS, pack_weight
from kernels.quantized import QuantizedWeight
from kernels.recurrence import Recurrence
from kernels.sampling import Adjustment
from kernels.triton import blocks, logits, sampling, tiles
from kernels.triton.backend import TritonBackend
from kernels.triton.cache import allocate
from kernels.triton.dense import DenseLinear
from kernels.triton.linear import QuantizedLinear
from kernels.triton.rounded import RoundedLinear
from kernels.triton.tiles import most_shared_bytes

KERNELS = Path(__file__).parents[3] / "kernels" / "triton"
CPU = torch.device("cpu")
MOST_PROGRAMS = (2**31 - 1, 2**16 - 1, 2**16 - 1)  # of CUDA's grids, by dimension
VOCABULARY = 262_144  # Gemma 3's
TOKENS = 131_072  # of one step: a whole prompt of Llama 3.1
REQUESTS = 1024
LAYERS = 126  # Llama 3.1 405B's


@pytest.fixture
def grids(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[tuple[int, ...]]]:
    """By kernel, the grids that are launched; nothing runs, so that tensors need no pages."""
    seen: dict[str, set[tuple[int, ...]]] = {}

    def note(kernel: Any, *args: Any, grid: Any, **options: Any) -> None:
        seen.setdefault(kernel.fn.__name__, set()).add(tuple(grid))

    monkeypatch.setattr(triton.JITFunction, "run", note)
    monkeypatch.setattr(InterpretedFunction, "run", note)
    return seen


def launch_attention(backend: TritonBackend) -> None:
    many = ((9, 1),) * REQUESTS
    for heads, slices in (
        ((8, 1, 16), ((9, 1), (0, TOKENS))),
        ((64, 64, 16), many),
        ((71, 1, 16), (*many, (0, 33))),
    ):
        case = AttentionCase("", heads, 16, slices)
        q_TND, batch, cache = checks.attention_inputs(case, backend, torch.float16, CPU)
        for way in (TritonBackend(one_launch=False), TritonBackend(one_launch=True)):
            way.attention(q_TND, batch, cache, case.shape)
        width = (heads[0] + 2 * heads[1]) * heads[2]
        qkv_TX = torch.empty(len(q_TND), width, dtype=torch.float16)
        backend.rope_and_cache(qkv_TX, torch.empty(1, 16), batch, cache, case.shape)


@pytest.mark.parametrize(
    ("head_dim", "group", "arch", "fits"),
    [(576, 16, 80, True), (576, 32, 90, True), (576, 16, 86, True), (576, 32, 86, True),
     (576, 64, 90, False), (576, 64, 100, False), (288, 40, 86, True), (288, 40, 80, True),
     (288, 128, 86, False), (64, 71, 86, True)],
)  # fmt: skip
def test_heads_that_a_program_cannot_hold_are_refused(
    head_dim: int, group: int, arch: int, fits: bool
) -> None:
    """The shapes of latent attention, of which all heads share one key."""
    problem = tiles.unsupported_heads(head_dim, group, 2, arch)
    assert fits == (problem is None)
    assert problem is None or f"{group} query heads of {head_dim} features" in problem


def launch_layers(backend: TritonBackend) -> None:
    for size in ((TOKENS, 64), (1, 73_728)):  # Gemma 2 27B's inner size, gate and up
        x_TH = torch.empty(size)
        backend.add_rms_norm(x_TH, x_TH, torch.empty(size[1]), 1e-5)
        backend.activate(x_TH, "silu", gated=True)
    [mine, _] = make_ranks(2, PEER_ROWS, 64, torch.float32, CPU)
    (part_TH, _), residual_TH, weight_H = draw(2, PEER_ROWS, 64, torch.float32, CPU)
    backend.reduce_add_rms_norm(part_TH, residual_TH, weight_H, 1e-5, mine)
    x_TH, experts = checks.expert_inputs(
        ExpertCase("", TOKENS // 64, (512, 10, 32, 32)), backend, torch.float32, CPU
    )
    backend.moe(x_TH, experts, ExpertCase("", 0, (0, 0, 0, 0)).form)
    form = Recurrence(num_key_heads=1, num_heads=1, key_dim=1, value_dim=1, delta=True)
    recurrent = RecurrenceCase("", form, (*(1,) * (REQUESTS - 1), TOKENS))
    run_recurrence(recurrent, recurrence_inputs(recurrent, torch.float16, CPU), backend)
    adapted = AdapterCase("", (0,) * 16, (64,), 64, 28_672, (VOCABULARY // 4, 8))
    module, x_TK, y_TO, runs = adapter_inputs(adapted, torch.float32, CPU)
    backend.add_adapters(module, x_TK, y_TO, runs)


def launch_products() -> None:
    weight_OK = torch.empty(VOCABULARY, 256, dtype=torch.float16)
    dense = DenseLinear(weight_OK, None, *reversed(weight_OK.shape))
    dense.multiply_few(torch.empty(3, 256, dtype=torch.float16))
    for kind in QUANTIZATIONS:
        few = pack_weight(torch.zeros(2, 2048), kind)
        for rows in (64, VOCABULARY):
            codes, scales = few.codes[:1].expand(rows, -1), few.scales[:1].expand(rows, -1)
            packed = replace(few, codes=codes, scales=scales)
            linear = QuantizedLinear(packed, None)
            linear.dequantize(torch.float16)
            for tokens in (1, 128):
                linear(torch.empty(tokens, 2048, dtype=torch.float16))
    for rows in (64, VOCABULARY):
        codes_OK, scales_O1 = torch.empty(rows, 2048, dtype=torch.int8), torch.empty(rows, 1)
        rounded = QuantizedWeight(codes_OK, scales_O1, 8, 0, input_rounding="token")
        for tokens in (1, 128, TOKENS // 64):
            RoundedLinear(rounded, None, CPU)(torch.empty(tokens, 2048, dtype=torch.float16))


def launch_sampling() -> None:
    nothing = np.zeros(0, dtype=np.int32)
    mask_W = torch.ones(VOCABULARY // 32, dtype=torch.int32)
    bias = tuple((token, 1.0) for token in range(300))
    rows = [Adjustment(i, nothing, nothing, bias, allowed_W=mask_W) for i in range(REQUESTS)]
    logits_RV = torch.empty(REQUESTS, VOCABULARY)
    logits.adjust(logits_RV, rows)
    sampling.sample_rows(logits_RV, torch.empty(REQUESTS, 3, dtype=torch.float64))


def launch_moves() -> None:
    layers = allocate(LAYERS, 4, 1, AttentionCase("", (1, 1, 16), 1, ()).shape, torch.half, CPU)
    blocks.copy_blocks(layers, [(0, i + 1) for i in range(REQUESTS)])


def test_no_grid_is_larger_than_cuda_allows(grids: dict[str, set[tuple[int, ...]]]) -> None:
    backend = TritonBackend()
    launch_attention(backend)
    launch_layers(backend)
    launch_products()
    launch_sampling()
    launch_moves()
    written = "".join(path.read_text() for path in KERNELS.glob("*.py"))
    assert grids.keys() == set(re.findall(r"^def (_\w+_kernel)\(", written, re.M))
    beyond = {
        (name, grid)
        for name, launched in grids.items()
        for grid in launched
        if any(size > most for size, most in zip(grid, MOST_PROGRAMS, strict=False))
    }
    assert not beyond
    # The shapes are large enough to tell: rows of a head do not fit the second dimension.
    assert max(grid[0] for grid in grids["_dequantize_kernel"]) >= VOCABULARY


def test_a_gpu_is_filled_by_its_own_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    own = SimpleNamespace(multi_processor_count=72)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: own)  # of the current device
    assert tiles._num_multiprocessors.__wrapped__() == 72


def test_shared_memory_is_what_the_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    kib = {arch: most_shared_bytes(arch) / 1024 for arch in (80, 86, 89, 90, 100, 120, 999)}
    assert kib == {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99, 999: 99}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (99, 9))
    told = SimpleNamespace(shared_memory_per_block_optin=12345)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: told)
    assert most_shared_bytes(999) == 12345
    assert most_shared_bytes(90) == 227 * 1024  # of GPUs that are not here
    told = SimpleNamespace()  # an older torch
    assert most_shared_bytes(999) == 99 * 1024
