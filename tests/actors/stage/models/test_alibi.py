"""ALiBi's slopes and biases are those of transformers, bit for bit, for any number of heads."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon
from transformers.models.mpt import modeling_mpt

from actors.stage.models.alibi import Alibi, alibi_table, bloom_slopes, mpt_slopes

HEADS = [1, 2, 4, 6, 7, 12, 16, 32, 71, 112, 128]
POSITIONS = 2048


@pytest.mark.parametrize("heads", HEADS)
def test_bloom(heads: int) -> None:
    mask = torch.ones(1, POSITIONS, dtype=torch.long)
    theirs = modeling_bloom.build_alibi_tensor(mask, heads, torch.float32)[:, 0]
    ours = alibi_table(Alibi(bloom_slopes(heads)), POSITIONS, slice(None))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("heads", HEADS)
def test_falcon(heads: int) -> None:
    """In steps of bfloat16, of both slopes and positions, whatever the model's type."""
    mask = torch.ones(1, POSITIONS, dtype=torch.long)
    theirs = modeling_falcon.build_alibi_tensor(mask, heads, torch.float32)[:, 0]
    alibi = Alibi(bloom_slopes(heads), rounds=True, divisor=math.sqrt(72))
    assert torch.equal(alibi_table(alibi, POSITIONS, slice(None)), theirs / math.sqrt(72))


@pytest.mark.parametrize("largest", [8, 16])
@pytest.mark.parametrize("heads", HEADS)
def test_mpt(heads: int, largest: int) -> None:
    """Theirs are relative to the last position."""
    theirs = modeling_mpt.build_mpt_alibi_tensor(heads, POSITIONS, largest)[:, 0]
    ours = alibi_table(Alibi(mpt_slopes(heads, largest)), POSITIONS, slice(None))
    assert torch.equal(-ours.flip(1), theirs)


def test_a_rank_has_the_rows_of_its_heads() -> None:
    alibi = Alibi(bloom_slopes(6))
    whole = alibi_table(alibi, 20, slice(None))
    assert torch.equal(alibi_table(alibi, 20, slice(3, 6)), whole[3:])
