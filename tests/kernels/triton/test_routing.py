"""Sorted assignments: each once, in blocks of one expert, as many as the sizes alone say."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be tested")

from app.bench.gpu.checks import poisoned_outputs
from kernels.triton.routing import most_blocks, sort_by_expert

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")


def routing(tokens: int, num_experts: int, top_k: int, chosen: int) -> torch.Tensor:
    """(T, K) different experts among the last `chosen`."""
    picked = [torch.randperm(chosen)[:top_k] for _ in range(tokens)]
    return (torch.stack(picked) + num_experts - chosen).to(DEVICE)


@pytest.mark.parametrize(
    ("tokens", "num_experts", "top_k", "chosen"),
    [
        (1, 4, 1, 4), (1, 64, 8, 64), (3, 5, 2, 5), (64, 4, 1, 1), (65, 4, 1, 1), (200, 64, 8, 64),
        (200, 64, 8, 8), (130, 7, 3, 4),
    ],
)  # fmt: skip
@pytest.mark.parametrize("rows", [16, 64])
def test_every_assignment_is_in_a_block_of_its_expert(
    tokens: int, num_experts: int, top_k: int, chosen: int, rows: int
) -> None:
    torch.manual_seed(tokens)
    ids_TK = routing(tokens, num_experts, top_k, chosen)
    with poisoned_outputs():
        blocks = sort_by_expert(ids_TK, num_experts, rows)
    ids_A = ids_TK.flatten().cpu()
    used = 0
    for expert in range(num_experts):
        wanted = (ids_A == expert).nonzero().flatten().tolist()
        for first in range(0, len(wanted), rows):
            inside = wanted[first : first + rows]
            assert int(blocks.experts_B[used]) == expert
            assert blocks.rows_BR[used].tolist() == inside + [-1] * (rows - len(inside))
            used += 1
    assert blocks.num_blocks == most_blocks(tokens * top_k, num_experts, rows)
    assert blocks.experts_B[used:].tolist() == [-1] * (blocks.num_blocks - used)


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("num_experts", [1, 4, 64])
def test_more_assignments_than_one_pass_counts(num_experts: int, rows: int) -> None:
    torch.manual_seed(0)
    ids_TK = torch.randint(0, num_experts, (2500, 1), device=DEVICE)
    blocks = sort_by_expert(ids_TK, num_experts, rows)
    in_order = blocks.rows_BR[blocks.experts_B >= 0].flatten()
    assert torch.equal(in_order[in_order >= 0].long(), ids_TK.flatten().sort(stable=True).indices)


def test_no_routing_needs_more_blocks_and_some_need_as_many() -> None:
    rows = 16
    for num_experts in (1, 3, 8):
        for num_assignments in range(1, 80):
            used = min(num_experts, num_assignments)
            # One assignment each, and all others for the last expert.
            counts = [1] * (used - 1) + [num_assignments - used + 1]
            worst = sum(-(-count // rows) for count in counts)
            assert most_blocks(num_assignments, num_experts, rows) == worst
            even = [num_assignments // used + (e < num_assignments % used) for e in range(used)]
            assert sum(-(-count // rows) for count in even) <= worst
