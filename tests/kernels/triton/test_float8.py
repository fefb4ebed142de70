"""fp8 caches are read by the GPU's own conversion where it has one, to the same numbers. That the
instruction is in the machine code: test_compile."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be tested")
# Set by tests/conftest.py where there is no GPU.
ON_GPU = os.environ.get("TRITON_INTERPRET") != "1"

from app.bench.gpu import checks  # noqa: E402
from app.bench.gpu.checks import AttentionCase  # noqa: E402
from kernels.interface import AttentionShape  # noqa: E402
from kernels.triton import cache, kv_tiles, prefill  # noqa: E402
from kernels.triton.backend import TritonBackend, paged  # noqa: E402
from kernels.typical_batch import typical_batch  # noqa: E402

DEVICE = torch.device("cuda" if ON_GPU else "cpu")
CASE = AttentionCase("float8", (2, 1, 32), 16, ((40, 1), (20, 9)), float8=True)


@pytest.mark.parametrize("arch", [80, 90])
def test_attention_by_arithmetic_and_by_instruction(
    monkeypatch: pytest.MonkeyPatch, arch: int
) -> None:
    torch.manual_seed(0)
    for module in (kv_tiles, prefill):
        monkeypatch.setattr(module, "target_arch", lambda: arch)
    result = checks.check_attention(CASE, TritonBackend(), torch.float16, DEVICE)
    assert result.passed, result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_exceeds_the_format_is_stored_as_its_largest_number(dtype: torch.dtype) -> None:
    """The format has no infinity: the code after the largest number is NaN, which would spread."""
    given = [440.0, 448.0, 449.0, 464.0, 480.0, 2e4, 6e4, 0.0]
    expected = [448.0] * 7 + [0.0]  # 440 lies half way between 432 and 448, which is even
    shape = AttentionShape(1, 1, 8, 1.0)
    [layer] = TritonBackend().allocate_kv(1, 1, 16, shape, cache.FLOAT8, DEVICE)
    batch, _ = typical_batch(1, 3, 1, 16, DEVICE)
    batch.slot_mapping_T = torch.tensor([3, 5], dtype=torch.int32, device=DEVICE)
    row = torch.tensor(given, device=DEVICE)
    qkv_TX = torch.stack((torch.cat((row, row, -row)), torch.cat((row, -row, row)))).to(dtype)
    unturned_PD = torch.cat((torch.ones(1, 4), torch.zeros(1, 4)), 1).to(DEVICE)
    TritonBackend().rope_and_cache(qkv_TX, unturned_PD, batch, layer, shape)
    for stored, signs in ((paged(layer).keys, (1, -1)), (paged(layer).values, (-1, 1))):
        for slot, sign in zip((3, 5), signs, strict=True):
            found = stored[0, slot, 0].view(cache.FLOAT8).float() * sign
            assert found.tolist() == expected
