"""The comparison with transformers' continuous batching, on a tiny model and the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: the GPU bench drives its kernels")

from app.bench.engine.stage import LoadedStage
from app.bench.gpu import peer
from app.bench.gpu.command import SECTIONS, UNASKED
from app.simulate.run.record import RunRecord
from app.simulate.workload.requests import Workload

CPU = torch.device("cpu")
SIZES = {"num_blocks": 64, "max_batch_tokens": 256, "block_size": 16}


def few_tokens(count: int, qps: float) -> Workload:
    arrivals = np.arange(count) / qps if qps else np.zeros(count)
    return Workload(arrivals, np.full(count, 12), np.full(count, 5))


def test_it_is_the_last_section_and_not_run_unasked() -> None:
    assert SECTIONS[-1] == "peers"
    assert "peers" not in UNASKED


def test_both_serve_every_request_at_every_load(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "workload_of", few_tokens)
    folder = tiny_model("llama")
    stage = LoadedStage(
        folder, backend="torch", threads=1, max_requests=8, max_step_tokens=64, kv_tokens=2048
    )
    rows = list(peer.compare(folder, CPU, stage, [(0.0, 4), (50.0, 3)], **SIZES))
    assert [row.server.split()[0] for row in rows] == ["legato"] * 2 + ["transformers"] * 2
    for row in rows:
        assert row.num_completed == row.num_requests == (3 if row.qps else 4)
        assert row.output_tokens_per_s == pytest.approx(5 * row.num_requests / row.span_s)
        assert 0 < row.tbt_p50_ms <= row.tbt_p99_ms <= row.tbt_max_ms


def test_the_peer_computes_the_same_shape(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("llama")
    model = peer.random_model(folder, CPU, "sdpa")
    stage = LoadedStage(folder, backend="torch", threads=1, max_requests=2, kv_tokens=64)
    assert sum(p.numel() for p in model.parameters()) == stage.info.num_parameters
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_a_request_that_fails_ends_the_run() -> None:
    run = peer.PeerRun.__new__(peer.PeerRun)
    run.record = RunRecord(1)
    with pytest.raises(RuntimeError, match="no memory"):
        run._take(SimpleNamespace(error="no memory"), 1.0)


def test_all_requests_come_at_once_without_a_rate() -> None:
    at_once, spread = peer.workload_of(20, 0.0), peer.workload_of(20, 4.0)
    assert not at_once.arrival_s.any()
    assert spread.arrival_s[-1] > spread.arrival_s[0]
    assert (at_once.prompt_tokens == spread.prompt_tokens).all()
