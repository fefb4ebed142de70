"""Every kernel builds to machine code for Ampere, Ada, Hopper and Blackwell, with no GPU here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be compiled")

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).parents[3]
# The most shared memory one program may take, per compute capability.
SHARED_BYTES = {
    arch: kib * 1024
    for arch, kib in ((80, 163), (86, 99), (89, 99), (90, 227), (100, 227), (120, 99))
}
MATRIX_INSTRUCTION = {90: "wgmma.mma_async", 100: "tcgen05.mma"}  # of others: mma.sync
KERNELS = {
    "_bin_kernel",
    "_causal_conv_kernel",
    "_chunk_kernel",
    "_count_kernel",
    "_decode_kernel",
    "_draw_kernel",
    "_edit_kernel",
    "_dequantize_kernel",
    "_expand_kernel",
    "_expert_linear_kernel",
    "_few_tokens_kernel",
    "_finish_kernel",
    "_hybrid_kernel",
    "_interval_kernel",
    "_list_kernel",
    "_mask_kernel",
    "_merge_kernel",
    "_move_kernel",
    "_place_kernel",
    "_plan_kernel",
    "_prefill_kernel",
    "_prepare_kernel",
    "_quantized_linear_kernel",
    "_recurrence_kernel",
    "_reduce_norm_kernel",
    "_rms_norm_kernel",
    "_round_inputs_kernel",
    "_rounded_linear_kernel",
    "_rope_and_cache_kernel",
    "_shrink_kernel",
    "_silu_mul_kernel",
    "_sum_experts_kernel",
    "_sum_parts_kernel",
    "_sum_segments_kernel",
}


@pytest.mark.tensors
def test_nothing_compiles_while_serving() -> None:
    """Neither sizes nor lengths of batches make another variant of a kernel: one each, of which
    those that no step runs by itself are the ones that are warmed with the cache."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.triton.kernel_variants"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    counts = json.loads(done.stdout)
    assert set(counts["variants"]) == {
        "_bin_kernel", "_causal_conv_kernel", "_chunk_kernel", "_count_kernel", "_decode_kernel",
        "_draw_kernel", "_edit_kernel", "_expand_kernel", "_expert_linear_kernel",
        "_few_tokens_kernel", "_finish_kernel", "_hybrid_kernel", "_interval_kernel",
        "_list_kernel", "_mask_kernel", "_merge_kernel", "_move_kernel", "_place_kernel",
        "_plan_kernel", "_prefill_kernel", "_prepare_kernel",
        "_recurrence_kernel", "_reduce_norm_kernel", "_rope_and_cache_kernel", "_shrink_kernel",
        "_sum_experts_kernel",
    }  # fmt: skip
    for counted in counts.values():  # gate and up, down
        assert counted.pop("_expert_linear_kernel") == 2
    assert set(counts["variants"].values()) == {1}
    assert counts["before_warming"] == counts["variants"]


def test_multiply_adds_are_fused_whatever_triton_does_by_default() -> None:
    import triton

    import kernels.triton  # noqa: F401

    assert os.environ["TRITON_DEFAULT_FP_FUSION"] == "1"
    enabled = getattr(triton.knobs.language, "fp_fusion_enabled", None)  # of Triton 3.9 and newer
    if enabled is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert enabled(None)
            assert not enabled(False)


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    """What tests/kernels/triton/compiled.py prints: one process compiles for several tests."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.triton.compiled"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.long
@pytest.mark.tensors
def test_the_widest_heads_fit_the_least_shared_memory(compiled: dict[str, Any]) -> None:
    shared_bytes = compiled["widest_heads"]
    assert shared_bytes.keys() >= {"_prefill_kernel", "_decode_kernel"}
    assert max(shared_bytes.values()) <= SHARED_BYTES[86]


@pytest.mark.long
@pytest.mark.tensors
def test_the_largest_tiles_of_packed_weights_fit_the_least_shared_memory(
    compiled: dict[str, Any],
) -> None:
    shared_bytes = compiled["largest_packed_tiles"]
    assert len(shared_bytes) == 2
    assert max(shared_bytes) <= SHARED_BYTES[86]


@pytest.mark.long
@pytest.mark.tensors
def test_ranks_wait_between_writing_and_reading(compiled: dict[str, Any]) -> None:
    """In the machine's order, over all GPUs: the part's stores, a barrier of the program, the
    release, the acquire in a loop, a barrier, and only then loads of all parts."""
    # w: a vector is written, r: read, |: barrier. x, weight and residual: two vectors each.
    kinds = {"w": r"st\.global\.v4", "r": r"ld\.global\.v4", "|": r"bar\.sync"}
    kinds |= {"R": r"sys\.release|release\.sys", "A": r"sys\.acquire|acquire\.sys"}
    patterns = "|".join(f"(?P<_{ord(k)}>{kind})" for k, kind in kinds.items())
    found = re.findall(patterns, compiled["sum_over_ranks"])
    order = "".join([*kinds][[*map(bool, groups)].index(True)] for groups in found)
    assert re.fullmatch(r"rrww\|+R\|*rrrr\|*A\|+(rr){8}ww\|+ww", order), order


@pytest.mark.long
@pytest.mark.tensors
def test_fp8_caches_are_read_by_the_instruction_where_there_is_one(
    compiled: dict[str, Any],
) -> None:
    found = compiled["float8_conversions"]
    for kernel in ("_decode_kernel", "_prefill_kernel"):
        assert not found["80"][kernel]
        assert found["90"][kernel]


@pytest.mark.tensors
@pytest.mark.parametrize(
    ("arch", "options"),
    [(90, ["--once"]), *(pytest.param(arch, [], marks=pytest.mark.long) for arch in SHARED_BYTES)],
)
def test_every_kernel_compiles(arch: int, options: list[str]) -> None:
    """All variants of them take minutes where none has been compiled before."""
    # A process of its own: interpreted kernels, as the other tests import them, do not compile.
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "app.cli.main", "bench", "compile", str(arch), *options, "--json"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout)["kernels"]
    # Measured on Hopper alone, where cuBLAS is slower; it takes more memory than others have.
    left_out = set() if arch in (90, 100) else {"_few_tokens_kernel"}
    assert {row["kernel"] for row in rows} == KERNELS - left_out
    assert all(row["cubin_bytes"] > 0 for row in rows)
    assert max(row["shared_bytes"] for row in rows) <= SHARED_BYTES[arch]
    for kernel in (
        "_prefill_kernel", "_hybrid_kernel", "_expert_linear_kernel", "_rounded_linear_kernel",
        "_prepare_kernel", "_chunk_kernel",
    ):  # fmt: skip
        used = {row["tensor_cores"] for row in rows if row["kernel"] == kernel}
        assert used == {MATRIX_INSTRUCTION.get(arch, "mma.sync")}, kernel
    if arch == 90:  # two programs share a multiprocessor
        for kernel in ("_prefill_kernel", "_hybrid_kernel"):
            shared = [row["shared_bytes"] for row in rows if row["kernel"] == kernel]
            assert max(shared) <= SHARED_BYTES[arch] // 2
    for kernel in ("_shrink_kernel", "_expand_kernel"):  # 16 rows: no group of warps' instruction
        used = {row["tensor_cores"] for row in rows if row["kernel"] == kernel}
        assert used == {"mma.sync"}, kernel
    for kernel in ("_causal_conv_kernel", "_recurrence_kernel", "_prepare_kernel", "_chunk_kernel"):
        # States stay in registers.
        assert {row["stack_bytes"] for row in rows if row["kernel"] == kernel} == {0}, kernel
    rounded = [row for row in rows if row["kernel"] == "_rounded_linear_kernel"]
    if arch != 100:  # whose instruction does not name the types
        assert {operand for row in rounded for operand in row["operands"]} == (
            {"s8"} if arch < 89 else {"s8", "e4m3"}
        )
    # Tiles of x and of weights wait in shared memory, two stages of 64 + 128 rows at least: though
    # their addresses come from a table, the compiler knows weights to be aligned and prefetches.
    experts = [row["shared_bytes"] for row in rows if row["kernel"] == "_expert_linear_kernel"]
    assert min(experts) >= 2 * (64 + 128) * 64 * 2
