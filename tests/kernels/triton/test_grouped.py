"""The layers of experts as one: their addresses, biases and forms."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be tested")
from app.bench.gpu import checks
from app.bench.gpu.checks import ExpertCase
from app.bench.gpu.stored_case import StoredCase
from kernels.layer_form import LayerForm
from kernels.torch.backend import TorchBackend
from kernels.triton.backend import TritonBackend
from kernels.triton.grouped import grouped

# Set by tests/conftest.py where there is no GPU.
DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
BACKEND = TritonBackend()
SILU = LayerForm(1e-5)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_weights_that_are_not_aligned_are_copied() -> None:
    case = ExpertCase("", 3, (4, 2, 64, 32), SILU)
    x, experts = checks.expert_inputs(case, BACKEND, torch.float32, DEVICE)
    expected = BACKEND.moe(x, experts, SILU)
    buffer = torch.empty(64 * 32 + 1, device=DEVICE)
    weight = buffer[1:].view(64, 32).copy_(experts.downs[0].weight_OK)
    moved = replace(experts, downs=[BACKEND.pack_linear(weight, None), *experts.downs[1:]])
    layers = grouped(moved)
    assert layers is not None
    addresses = layers[1].addresses_PE
    assert int(addresses[0, 0]) != weight.data_ptr()
    assert not (addresses % 16).any()
    assert torch.equal(BACKEND.moe(x, moved, SILU), expected)


def test_some_biases_are_zero() -> None:
    case = ExpertCase("", 9, (4, 2, 64, 32), SILU, biased=True)
    x, experts = checks.expert_inputs(case, BACKEND, torch.float32, DEVICE)
    experts.downs[2].bias_O = None
    torch.testing.assert_close(
        BACKEND.moe(x, experts, SILU), TorchBackend().moe(x, experts, SILU), rtol=1e-4, atol=1e-5
    )


def test_some_experts_have_zeros() -> None:
    """A layer's zeros may happen to be all 0, which the reader of a checkpoint leaves out."""
    case = ExpertCase("", 9, (4, 2, 64, 32), SILU, stored=StoredCase(4, 32, has_zeros=True))
    x, experts = checks.expert_inputs(case, BACKEND, torch.float32, DEVICE)
    weight = StoredCase(4, 32).draw(64, 32)
    other = BACKEND.pack_quantized([weight], None, torch.float32, DEVICE)
    mixed = replace(experts, downs=[other, *experts.downs[1:]])
    assert grouped(mixed) is not None
    torch.testing.assert_close(
        BACKEND.moe(x, mixed, SILU), TorchBackend().moe(x, mixed, SILU), rtol=1e-4, atol=1e-5
    )


def test_a_dense_and_a_packed_layer() -> None:
    case = ExpertCase("", 9, (4, 2, 64, 32), SILU, stored=StoredCase(4, 32, has_zeros=True))
    x, packed = checks.expert_inputs(case, BACKEND, torch.float32, DEVICE)
    _, dense = checks.expert_inputs(replace(case, stored=None), BACKEND, torch.float32, DEVICE)
    mixed = replace(packed, gate_ups=dense.gate_ups)
    assert grouped(mixed) is not None
    torch.testing.assert_close(
        BACKEND.moe(x, mixed, SILU), TorchBackend().moe(x, mixed, SILU), rtol=1e-4, atol=1e-5
    )


def test_experts_of_several_forms_are_not_grouped() -> None:
    case = ExpertCase("", 9, (4, 2, 64, 32), SILU, stored=StoredCase(4, 32, has_zeros=True))
    x, experts = checks.expert_inputs(case, BACKEND, torch.float32, DEVICE)
    weight = StoredCase(8, 32).draw(64, 32)
    wider = BACKEND.pack_quantized([weight], None, torch.float32, DEVICE)
    dense = BACKEND.pack_linear(torch.randn(64, 32, device=DEVICE), None)
    for other in (wider, dense):
        mixed = replace(experts, downs=[other, *experts.downs[1:]])
        assert grouped(mixed) is None
        expected = TorchBackend().moe(x, mixed, SILU)
        torch.testing.assert_close(BACKEND.moe(x, mixed, SILU), expected, rtol=1e-4, atol=1e-5)
