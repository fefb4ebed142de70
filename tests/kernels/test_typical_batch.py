"""The batch that attention is timed with."""

from __future__ import annotations

import pytest
import torch

from kernels.typical_batch import MOST_BYTES, decodes_within, layers_within, typical_batch


@pytest.mark.parametrize(("context", "chunk"), [(31, 70), (100, 20)])
def test_every_slice_has_blocks_of_its_own(context: int, chunk: int) -> None:
    batch, num_blocks = typical_batch(3, context, chunk, 16, torch.device("cpu"))
    assert batch.starts_S.tolist() == [context] * 3 + [0]
    assert batch.lengths_S.tolist() == [1] * 3 + [chunk]
    assert batch.query_starts_S1.tolist() == [0, 1, 2, 3, 3 + chunk]
    ends = batch.starts_S + batch.lengths_S
    assert batch.max_kv_length == int(ends.max())
    used = [
        block
        for table, end in zip(batch.block_tables_SB.tolist(), ends.tolist(), strict=True)
        for block in table[: -(-end // 16)]
    ]
    assert sorted(used) == list(range(num_blocks))


def test_decodes_and_layers_fit_the_memory() -> None:
    page_bytes = 1 << 20  # of Llama 3 8B, 256 positions
    assert decodes_within(32, 1024, 256, page_bytes) == 32
    assert decodes_within(32, 8192, 256, page_bytes) == MOST_BYTES // (33 * page_bytes)
    assert decodes_within(32, 8192, 256, MOST_BYTES) == 1
    assert layers_within(4, 100, page_bytes) == 4
    assert layers_within(4, 200, page_bytes) == 2
    assert layers_within(4, 1000, page_bytes) == 1
