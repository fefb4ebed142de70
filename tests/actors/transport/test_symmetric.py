"""Small all-reduces through shared buffers: the same sums, and large ones where they were."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch

from actors.transport.addresses import free_address
from actors.transport.symmetric import BUFFER_BYTES, ONE_SHOT_BYTES

# One shot, two shots, and three that do not fit: too large, no whole vectors, another type.
ITEMS = {
    "small": (3, 64),
    "one shot, to the brim": (ONE_SHOT_BYTES // 4,),
    "two shots": (ONE_SHOT_BYTES // 4 + 4,),
    "too large": (BUFFER_BYTES // 4 + 4,),
    "ragged": (5,),
}


def reduce_all(rank: int, address: str, answers: Any) -> None:
    from actors.transport.group import RankGroup
    from tests.actors.transport import shared_symmetric_memory

    operators = shared_symmetric_memory.install()
    group = RankGroup(rank, 2, address, torch.device("cpu", rank))
    group.use_symmetric_memory(torch.float32)
    generator = torch.Generator().manual_seed(rank)
    for name, shape in ITEMS.items():
        x = torch.randn(shape, generator=generator)
        assert group.all_reduce(x) is x
        answers.put((name, rank, x.numpy()))  # by value: a tensor's memory ends with its process
    other = torch.full((8,), rank + 1, dtype=torch.int64)
    answers.put(("other type", rank, group.all_reduce(other).numpy()))
    (memory,) = shared_symmetric_memory.SharedMemory.groups.values()
    answers.put(("shots", rank, (memory.num_one_shots, memory.num_two_shots)))
    group.close()
    del operators


def test_sums_are_those_of_the_group() -> None:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    address = free_address("127.0.0.1")
    processes = [
        context.Process(target=reduce_all, args=(rank, address, answers), daemon=True)
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    count = 2 * (len(ITEMS) + 2)
    found = {
        (name, rank): value for name, rank, value in (answers.get(timeout=60) for _ in range(count))
    }
    for process in processes:
        process.join(10)
    generators = [torch.Generator().manual_seed(rank) for rank in range(2)]
    for name, shape in ITEMS.items():
        expected = sum(torch.randn(shape, generator=g) for g in generators)
        for rank in range(2):
            torch.testing.assert_close(torch.from_numpy(found[name, rank]), expected)
    for rank in range(2):
        assert found["other type", rank].tolist() == [3] * 8
        assert found["shots", rank] == (2, 1)


def test_one_rank_needs_no_buffer() -> None:
    from actors.transport.group import RankGroup

    group = RankGroup()
    group.use_symmetric_memory(torch.float32)
    x = torch.ones(4)
    assert group.all_reduce(x) is x


@pytest.mark.parametrize("name", ["one_shot_all_reduce_out", "two_shot_all_reduce_"])
def test_torch_still_has_the_operators(name: str) -> None:
    assert hasattr(torch.ops.symm_mem, name)
