"""Collectives of a stage's ranks: what is asked of NCCL, and equal results over gloo."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from actors.transport.addresses import free_address
from actors.transport.group import RankGroup, keep_errors_of_nccl


class Nccl:
    """A group of two whose ranks hold the same; it computes on the caller's stream, so that there
    is no work to wait for."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, bool]] = []

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> None:
        self.calls.append(("allreduce", options.asyncOp))
        tensors[0].mul_(2)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> None:
        assert options.rootRank == 0
        self.calls.append(("broadcast", options.asyncOp))

    def _allgather_base(self, to: torch.Tensor, x: torch.Tensor, options: Any) -> None:
        self.calls.append(("allgather into one", options.asyncOp))
        to.copy_(torch.cat((x, x)))


def test_nccl_computes_on_the_callers_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stream of its own every sum would be forked and joined, also within a graph."""
    group, nccl = RankGroup(), Nccl()
    group.size = 2
    monkeypatch.setattr(group, "_group", nccl)
    monkeypatch.setattr(group, "_device", torch.device("cuda"), raising=False)
    x = torch.arange(6.0).view(2, 3)
    assert group.all_reduce(x.clone()).tolist() == (2 * x).tolist()
    assert group.broadcast(x) is x
    columns = group.gather_columns(x)
    assert columns is not None
    assert columns.tolist() == torch.cat((x, x), 1).tolist()
    assert group.gather_all(x).tolist() == torch.stack((x, x)).tolist()
    assert nccl.calls == [
        ("allreduce", False), ("broadcast", False), ("allgather into one", False),
        ("allgather into one", False),
    ]  # fmt: skip


def on_two_ranks(work: Callable[[RankGroup], Any]) -> list[Any]:
    address, answers = free_address("127.0.0.1"), [None, None]

    def run(rank: int) -> None:
        group = RankGroup(rank, 2, address)
        answers[rank] = work(group)
        group.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return answers


def test_columns_of_ranks_stand_side_by_side() -> None:
    def work(group: RankGroup) -> tuple[Any, ...]:
        x = torch.arange(6.0).view(3, 2) + 10 * group.rank
        columns = group.gather_columns(x[1:])
        everything = group.gather_all(x)
        first = group.broadcast(x.clone())
        return columns, everything.tolist(), first.tolist()

    first, second = on_two_ranks(work)
    x = torch.arange(6.0).view(3, 2)
    assert first[0].tolist() == torch.cat((x[1:], x[1:] + 10), 1).tolist()
    assert second[0] is None
    assert first[1] == second[1] == torch.stack((x, x + 10)).tolist()
    assert first[2] == second[2] == x.tolist()


def test_a_communicator_that_fails_ends_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("ASYNC_ERROR_HANDLING", "ENABLE_MONITORING", "DUMP_ON_TIMEOUT")
    for name in names:
        monkeypatch.setenv(f"TORCH_NCCL_{name}", "1")
        monkeypatch.delenv(f"TORCH_NCCL_{name}")
    monkeypatch.setenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "5")
    keep_errors_of_nccl()
    assert [os.environ[f"TORCH_NCCL_{name}"] for name in names] == ["0"] * 3
    assert os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] == "5", "an operator's word holds"
