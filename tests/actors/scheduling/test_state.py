"""Digests of KV content: equal prefixes have equal names, in every process."""

from __future__ import annotations

from array import array

import pytest

from actors.scheduling.state import chain_next, chain_root, prefix_digests


def test_digests_name_the_whole_prefix_and_the_salt() -> None:
    assert prefix_digests([1, 2, 3, 4], 2)[1] != prefix_digests([9, 2, 3, 4], 2)[1]
    assert prefix_digests([1, 2], 2, "a") != prefix_digests([1, 2], 2, "b")
    assert prefix_digests([1], 2) == []
    # equal in every process: a router compares them across replicas
    assert chain_next(chain_root(""), (1, 2)).hex() == "0a4c2d4a4f4ad218ca40f163a8563990"


@pytest.mark.parametrize("block_size", [1, 2, 16, 256])
def test_a_chain_of_blocks_and_a_whole_prefix_agree(block_size: int) -> None:
    tokens = array("q", range(100_000, 100_000 + 4 * block_size - 1))
    digest, found = chain_root("salt"), []
    for start in range(0, 3 * block_size, block_size):
        digest = chain_next(digest, list(tokens[start : start + block_size]))
        found.append(digest)
    assert prefix_digests(tokens, block_size, "salt") == found
