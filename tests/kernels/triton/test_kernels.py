"""Every Triton kernel against float64, on the GPU where there is one, else interpreted on CPU."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be tested")
# Set by tests/conftest.py where there is no GPU.
ON_GPU = os.environ.get("TRITON_INTERPRET") != "1"

from app.bench.gpu import checks  # noqa: E402
from kernels.torch.backend import TorchBackend  # noqa: E402
from kernels.triton import cache, prefill  # noqa: E402
from kernels.triton.backend import TritonBackend, paged  # noqa: E402
from tests.kernels.triton.interpreted import fuse_multiply_adds  # noqa: E402

DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# The interpreter's matrix product is wrong in bfloat16.
HALF = torch.bfloat16 if ON_GPU else torch.float16


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def backend() -> TritonBackend:
    return TritonBackend()


def case_id(case: checks.AttentionCase) -> str:
    return case.name.replace(" ", "-")


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("case", checks.SMALL_CASES, ids=case_id)
def test_attention(
    backend: TritonBackend,
    case: checks.AttentionCase,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fuse_multiply_adds(monkeypatch)
    result = checks.check_attention(case, backend, dtype, DEVICE)
    assert result.passed, result


@pytest.mark.parametrize("arch", [86, 120])
def test_attention_of_the_widest_heads_where_shared_memory_is_small(
    backend: TritonBackend, arch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "target_arch", lambda: arch)
    [case] = [case for case in checks.SMALL_CASES if case.name == "head of 256"]
    assert prefill.tile_of(case.shape, torch.float32).block_k == 16
    result = checks.check_attention(case, backend, torch.float32, DEVICE)
    assert result.passed, result


@pytest.mark.parametrize("norms", ["plain", "norm", "norms_last"])
@pytest.mark.parametrize(
    "case",
    [c for c in checks.SMALL_CASES if c.float8 or c.pad or c.heads in ((9, 3, 32), (4, 1, 80))],
    ids=case_id,
)
def test_rope_and_cache(backend: TritonBackend, case: checks.AttentionCase, norms: str) -> None:
    with_norm, last = norms != "plain", norms == "norms_last"
    for result in checks.check_rope(case, backend, torch.float32, DEVICE, with_norm, last):
        assert result.passed, result


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("size", [(1, 64), (3, 1000), (5, 4096)])
def test_elementwise(backend: TritonBackend, dtype: torch.dtype, size: tuple[int, int]) -> None:
    for result in checks.check_elementwise(backend, dtype, DEVICE, *size):
        assert result.passed, result


def test_blocks_survive_copies_and_a_trip_to_the_host(backend: TritonBackend) -> None:
    shape = checks.SMALL_CASES[0].shape
    layers = backend.allocate_kv(2, 5, 16, shape, HALF, DEVICE)
    first = paged(layers[0])
    first.keys.normal_()
    first.values.normal_()
    kept_k, kept_v = first.keys[1].clone(), first.values[1].clone()
    host = backend.read_block(layers[0], 1)
    assert host.device.type == "cpu"
    assert host.nbytes == backend.kv_block_bytes(16, shape, HALF)
    backend.copy_blocks(layers, [(1, 2), (2, 3)])  # in order: 3 receives what 2 just got
    first.keys[1] = 0
    backend.write_blocks(layers[:1], [4], [host[None]])
    for block in (2, 3, 4):
        assert torch.equal(first.keys[block], kept_k)
        assert torch.equal(first.values[block], kept_v)
    assert not paged(layers[1]).keys.any()


def test_a_float8_cache_takes_one_byte_a_number(backend: TritonBackend) -> None:
    shape = checks.SMALL_CASES[0].shape
    half = backend.kv_block_bytes(16, shape, HALF)
    assert backend.kv_block_bytes(16, shape, cache.FLOAT8) * 2 == half


def test_a_foreign_cache_is_refused(backend: TritonBackend) -> None:
    [layer] = TorchBackend().allocate_kv(
        1, 2, 16, checks.SMALL_CASES[0].shape, HALF, torch.device("cpu")
    )
    with pytest.raises(TypeError, match="TorchKVLayer"):
        backend.read_block(layer, 0)
