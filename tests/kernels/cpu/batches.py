"""For tests of the CPU backend: hybrid batches, a float64 reference, instruction sets."""

from __future__ import annotations

import functools
import hashlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ParamSpec

import pytest
import torch

from kernels.cpu import library
from kernels.interface import AttentionShape, Batch

P = ParamSpec("P")
SETS = [isa for isa in library.Isa if library.load() is not None and isa <= library.isa()]
# As a module's mark, the set is what changes from test to test first: a reference that is kept for
# the next test serves all of them.
EACH_SET = pytest.mark.parametrize("isa", SETS, ids=lambda isa: isa.name.lower())


@contextmanager
def instruction_set(isa: library.Isa) -> Iterator[None]:
    best = library.isa()
    library.set_isa(isa)
    try:
        yield
    finally:
        library.set_isa(best)


def kept(compute: Callable[P, torch.Tensor]) -> Callable[P, torch.Tensor]:
    """Its last results are looked up by what its arguments hold, whose tensors may change."""
    found: dict[bytes, torch.Tensor] = {}

    @functools.wraps(compute)
    def look_up(*args: P.args, **kwargs: P.kwargs) -> torch.Tensor:
        key = hashlib.sha1(pickle.dumps((args, kwargs))).digest()
        if key not in found:
            if len(found) == 8:
                found.pop(next(iter(found)))
            found[key] = compute(*args, **kwargs)
        return found[key]

    return look_up


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = library.num_threads()
    library.set_num_threads(count)
    try:
        yield
    finally:
        library.set_num_threads(before)


def make_tables(
    kv_lengths: Sequence[int], block_size: int, seed: int = 0, spare: int = 2
) -> tuple[torch.Tensor, int]:
    """Block tables of disjoint shuffled blocks (0 behind those in use), and how many blocks."""
    counts = [-(-length // block_size) for length in kv_lengths]
    total = sum(counts) + spare
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    tables = torch.zeros((len(counts), max(counts, default=0) + 1), dtype=torch.int32)
    used = 0
    for row, count in enumerate(counts):
        tables[row, :count] = order[used : used + count]
        used += count
    return tables, total


def make_batch(
    slices: Sequence[tuple[int, int]], block_tables_SB: torch.Tensor, block_size: int
) -> Batch:
    """slices: (start, number of tokens), decodes first; one row of block_tables_SB each."""
    starts = torch.tensor([s for s, _ in slices], dtype=torch.int32)
    lengths = torch.tensor([n for _, n in slices], dtype=torch.int32)
    positions, slots = [], []
    for row, (start, length) in enumerate(slices):
        where = torch.arange(start, start + length)
        positions.append(where)
        slots.append(
            block_tables_SB[row, where // block_size].long() * block_size + where % block_size
        )
    return Batch(
        positions_T=torch.cat(positions).to(torch.int32),
        query_starts_S1=torch.cat((torch.zeros(1), lengths.cumsum(0))).to(torch.int32),
        starts_S=starts,
        lengths_S=lengths,
        block_tables_SB=block_tables_SB.contiguous(),
        slot_mapping_T=torch.cat(slots).to(torch.int32),
        num_decodes=next((i for i, (_, n) in enumerate(slices) if n != 1), len(slices)),
        max_length=int(lengths.max()),
        max_kv_length=int((starts + lengths).max()),
    )


def identity_rotation(num_positions: int, head_dim: int) -> torch.Tensor:
    """A table that rotates nothing: cosines 1, sines 0."""
    half = head_dim // 2
    return torch.cat((torch.ones(num_positions, half), torch.zeros(num_positions, half)), dim=1)


def rotation(num_positions: int, head_dim: int) -> torch.Tensor:
    inverse = 10_000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.arange(num_positions, dtype=torch.float64)[:, None] * inverse
    return torch.cat((angle.cos(), angle.sin()), dim=1).float().contiguous()


@kept
def reference_attention(
    q_TND: torch.Tensor, k_LGD: torch.Tensor, v_LGD: torch.Tensor, start: int, shape: AttentionShape
) -> torch.Tensor:
    """One slice in float64: q rows stand at positions start + t -> (T, N * D)."""
    group = shape.num_heads // shape.num_kv_heads
    k_LND = k_LGD.double().repeat_interleave(group, dim=1)
    v_LND = v_LGD.double().repeat_interleave(group, dim=1)
    scores_NTL = torch.einsum("tnd,lnd->ntl", q_TND.double(), k_LND) * shape.scale
    if shape.softcap is not None:
        scores_NTL = shape.softcap * torch.tanh(scores_NTL / shape.softcap)
    if shape.alibi_NP is not None:
        bias_NL = shape.alibi_NP[:, : len(k_LGD)].double()
        own_NT = bias_NL[:, start : start + len(q_TND)]
        scores_NTL = scores_NTL + bias_NL[:, None] - own_NT[..., None]
    q_position_T1 = torch.arange(start, start + q_TND.shape[0])[:, None]
    k_position_L = torch.arange(k_LGD.shape[0])
    visible_TL = k_position_L <= q_position_T1
    if shape.sliding_window is not None and shape.chunked:
        visible_TL &= k_position_L // shape.sliding_window == q_position_T1 // shape.sliding_window
    elif shape.sliding_window is not None:
        visible_TL &= k_position_L > q_position_T1 - shape.sliding_window
    scores_NTL = scores_NTL.masked_fill(~visible_TL, float("-inf"))
    if shape.sinks_N is not None:
        sinks_NT1 = shape.sinks_N.double()[:, None, None].expand(-1, len(q_TND), 1)
        scores_NTL = torch.cat((scores_NTL, sinks_NT1), dim=2)
    weights_NTL = scores_NTL.softmax(-1)[:, :, : len(k_LGD)]
    return torch.einsum("ntl,lnd->tnd", weights_NTL, v_LND).flatten(1)
