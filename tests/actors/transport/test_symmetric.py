"""Small all-reduces through shared buffers: the same sums, and large ones where they were."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from actors.transport.addresses import free_address
from actors.transport.symmetric import BUFFER_BYTES, ONE_SHOT_BYTES, check_links
from tests.actors.transport.rank_processes import rank_processes

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
    group.use_symmetric_memory(torch.float32, 64)
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


TOKENS = (1, 3, 3, 2, 5, 1, 1, 4, 5)
WIDTH = 33


def reduce_and_norm(rank: int, size: int, address: str, answers: Any) -> None:
    from actors.transport.group import RankGroup
    from kernels.triton.backend import TritonBackend
    from tests.actors.transport import shared_symmetric_memory

    operators = shared_symmetric_memory.install()
    group = RankGroup(rank, size, address, torch.device("cpu", rank))
    group.use_symmetric_memory(torch.float16, WIDTH)
    assert group.peers is not None
    for number, parts in enumerate(parts_of_calls(size)):
        residual_TH = torch.full_like(parts[rank], number)
        weight_H = torch.ones(WIDTH, dtype=torch.float16)
        out_TH = TritonBackend().reduce_add_rms_norm(
            parts[rank], residual_TH, weight_H, 1e-5, group.peers
        )
        assert out_TH is not None
        whole = torch.ones(1024, dtype=torch.float16)  # over the same buffer, in between
        assert group.all_reduce(whole).tolist() == [size] * 1024
        answers.put((number, rank, (residual_TH.numpy(), out_TH.numpy())))
    group.close()
    del operators


def parts_of_calls(size: int) -> list[list[torch.Tensor]]:
    """Of each call, each rank's part."""
    generator = torch.Generator().manual_seed(1)
    return [
        [torch.randn(tokens, WIDTH, generator=generator).half() for _ in range(size)]
        for tokens in TOKENS
    ]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="processes share CPU memory")
@pytest.mark.parametrize("size", [2, 3])
def test_kernels_of_ranks_wait_for_each_other(size: int) -> None:
    """Each rank runs its kernels as fast as it can, and all find the same numbers."""
    pytest.importorskip("triton")
    found = run_ranks(reduce_and_norm, size, len(TOKENS) * size, size)
    for number, parts in enumerate(parts_of_calls(size)):
        for rank in range(size):
            for first, same in zip(found[number, 0], found[number, rank], strict=True):
                assert first.tobytes() == same.tobytes()
        expected_TH = sum(part_TH.float() for part_TH in parts) + number
        residual_TH, out_TH = map(torch.from_numpy, found[number, 0])
        torch.testing.assert_close(residual_TH.float(), expected_TH, rtol=2e-3, atol=4e-3)
        squares_T1 = out_TH.float().square().mean(1, keepdim=True)
        torch.testing.assert_close(squares_T1, torch.ones_like(squares_T1), rtol=2e-3, atol=0)


def run_ranks(target: Any, size: int, count: int, *arguments: Any) -> dict[tuple[Any, int], Any]:
    """What `target(rank, *arguments, address, answers)` answers, in processes, `count` times."""
    context = rank_processes()
    answers = context.Queue()
    address = free_address("127.0.0.1")
    processes = [
        context.Process(target=target, args=(rank, *arguments, address, answers), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    found = [answers.get(timeout=60) for _ in range(count)]
    for process in processes:
        process.join(10)
    return {(name, rank): value for name, rank, value in found}


def test_sums_are_those_of_the_group() -> None:
    found = run_ranks(reduce_all, 2, 2 * (len(ITEMS) + 2))
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
    group.use_symmetric_memory(torch.float32, 64)
    assert group.peers is None
    x = torch.ones(4)
    assert group.all_reduce(x) is x


@pytest.mark.parametrize("name", ["one_shot_all_reduce_out", "two_shot_all_reduce_"])
def test_torch_still_has_the_operators(name: str) -> None:
    assert hasattr(torch.ops.symm_mem, name)


def test_torch_still_has_the_addresses() -> None:
    from torch._C._distributed_c10d import _SymmetricMemory

    assert hasattr(_SymmetricMemory, "buffer_ptrs")


def reduce_float16(rank: int, address: str, answers: Any) -> None:
    from actors.transport.group import RankGroup
    from tests.actors.transport import shared_symmetric_memory

    operators = shared_symmetric_memory.install()
    group = RankGroup(rank, 2, address, torch.device("cpu", rank))
    group.use_symmetric_memory(torch.float16, 64)
    try:
        answers.put(("sum", rank, group.all_reduce(torch.ones(64).half()).tolist()))
    except AssertionError as error:
        answers.put(("sum", rank, str(error)))
    group.close()
    del operators


def test_float16_is_summed_by_the_group() -> None:
    """torch's operators have kernels of bfloat16 and float32 only."""
    found = run_ranks(reduce_float16, 2, 2)
    assert found == {("sum", 0): [2.0] * 64, ("sum", 1): [2.0] * 64}


def test_gpus_without_atomic_operations_on_each_other_are_refused() -> None:
    """Over PCIe: kernels would wait for counts that never arrive."""
    pairs = {(0, 1), (1, 0), (2, 3), (3, 2)}  # by NVLink

    def has_atomics(index: int, peer: int) -> bool:
        return (index, peer) in pairs

    check_links([1, 0], has_atomics)
    check_links([3, 3], has_atomics)  # one GPU, which torch's rendezvous names
    with pytest.raises(RuntimeError, match=r"cuda:0 has no atomic operations .* cuda:2"):
        check_links([2, 3, 1, 0], has_atomics)


def fail_to_meet(rank: int, address: str, answers: Any) -> None:
    from actors.transport.group import RankGroup
    from tests.actors.transport import shared_symmetric_memory

    operators = shared_symmetric_memory.install()
    group = RankGroup(rank, 2, address, torch.device("cpu", 0))  # both ranks on one device
    try:
        group.use_symmetric_memory(torch.float32, 64)
    except ValueError as error:
        answers.put(("error", rank, str(error)))
    del operators


def test_what_torch_refuses_names_the_setting() -> None:
    expected = "parallel.symmetric_memory: detected allocations from overlapping devices"
    assert run_ranks(fail_to_meet, 2, 2) == {("error", rank): expected for rank in range(2)}
