"""Sums of ranks through memory: exact, of any size, and an error when a rank goes."""

from __future__ import annotations

import functools
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from actors.transport.addresses import free_address
from tests.actors.stage.greedy_reference import skip_unless_available
from tests.actors.transport.rank_processes import rank_processes

COUNTS = (1, 7, 576, 40_000, 3_000_000)  # the last ones by several threads, and in pieces
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def part(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)


def joined(rank: int, size: int, address: str) -> Any:
    from actors.transport.group import RankGroup
    from kernels.cpu.backend import CpuBackend

    group = RankGroup(rank, size, address)
    group.use_shared_memory(CpuBackend().shared_memory_all_reduce)
    return group


def sum_all(rank: int, size: int, address: str, answers: Any) -> None:
    group = joined(rank, size, address)
    right = []
    for dtype in DTYPES:
        for count in COUNTS:
            parts = [part(r, count, dtype) for r in range(size)]
            expected = functools.reduce(torch.add, (p.float() for p in parts)).to(dtype)
            right.append(torch.equal(group.all_reduce(parts[rank]), expected))
    whole = group.all_reduce(torch.arange(5) + rank)  # of a type that goes by gloo
    answers.put((group.sums is not None, right, whole.tolist()))
    answers.close()
    answers.join_thread()


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_gets_the_sum_with_the_same_bits(size: int) -> None:
    skip_unless_available("cpu")
    context = rank_processes()
    answers, address = context.Queue(), free_address("127.0.0.1")
    processes = [
        context.Process(target=sum_all, args=(rank, size, address, answers), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for _ in range(size):
        through_memory, right, whole = answers.get(timeout=120)
        assert through_memory
        assert right == [True] * len(DTYPES) * len(COUNTS)
        assert whole == [size * n + sum(range(size)) for n in range(5)]
    for process in processes:
        process.join(10)


def wait_in_a_sum(rank: int, address: str, pipe: Connection) -> None:
    group = joined(rank, 2, address)
    group.all_reduce(torch.ones(8))
    pipe.send("joined")
    if rank == 1:
        pipe.recv()  # until it is killed, or told to leave
        group.close()
        return
    try:
        group.all_reduce(torch.ones(8))
    except RuntimeError as error:
        pipe.send(str(error))


@pytest.mark.parametrize(("killed", "said"), [(True, "died"), (False, "left")])
def test_a_rank_that_waits_for_one_that_is_gone_gets_an_error(killed: bool, said: str) -> None:
    skip_unless_available("cpu")
    context = rank_processes()
    address = free_address("127.0.0.1")
    pipes, processes = [], []
    for rank in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(target=wait_in_a_sum, args=(rank, address, theirs), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    for pipe in pipes:
        assert pipe.poll(60)
        assert pipe.recv() == "joined"
    if killed:
        os.kill(processes[1].pid or 0, signal.SIGKILL)
        processes[1].join()  # reaped: until then its id is alive
    else:
        pipes[1].send("leave")
    assert pipes[0].poll(10)
    assert said in pipes[0].recv()
    for process in processes:
        process.join(10)


def test_ranks_of_two_machines_go_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that cannot open the file keeps all of them from using it."""
    from actors.transport import shared_memory

    class Store(dict[str, bytes]):
        def set(self, key: str, value: bytes) -> None:
            self[key] = value

        def get(self, key: str, default: Any = None) -> bytes:
            return self[key]

    store = Store({"shared/1": b"-"})
    assert shared_memory.shared_file(store, 0, 2, 4096) is None
    named = store["shared/file"].decode()
    monkeypatch.setattr(shared_memory, "_boot_id", lambda: "another")
    assert shared_memory._open(named, 4096) is None
