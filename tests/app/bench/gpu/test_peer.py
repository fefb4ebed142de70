"""The comparison with transformers' continuous batching, on a tiny model and the CPU."""

from __future__ import annotations

import math
import time
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


class Manager:
    """Answers its first request, with an error if it has one, and computes the second for ever."""

    def __init__(self, error: str | None) -> None:
        self._error = error
        self._answers: list[SimpleNamespace] = []

    def add_request(self, prompt: list[int], request_id: str, **_: object) -> None:
        now_s = time.perf_counter()
        times_s = [now_s, now_s + 0.25, now_s + 0.5]
        error = self._error if request_id == "0" else "stopped"
        self._answers.append(
            SimpleNamespace(request_id=request_id, timestamps=times_s, error=error)
        )

    def get_result(self, timeout: float) -> SimpleNamespace | None:
        answered = self._answers and (self._answers[0].request_id == "0" or self._is_stopped)
        return self._answers.pop(0) if answered else None

    _is_stopped = False

    def is_running(self) -> bool:
        return not self._is_stopped

    def stop(self, **_: object) -> None:
        self._is_stopped = True

    def warmup(self) -> None: ...

    def start(self) -> None: ...


def run_of(manager: Manager) -> peer.PeerRun:
    model = SimpleNamespace(
        config=SimpleNamespace(vocab_size=50), init_continuous_batching=lambda **_: manager
    )
    return peer.PeerRun(model, few_tokens(2, 0.0))


def test_tokens_of_requests_that_were_given_up_count() -> None:
    run = run_of(Manager(None))
    record = run.run(give_up_after_s=0.01)
    assert record.num_output_tokens == [3, 3]
    assert list(record.gaps_s) == pytest.approx([0.25] * 4)
    assert [math.isnan(at_s) for at_s in record.finished_s] == [False, True]


def test_a_request_that_fails_ends_the_run() -> None:
    with pytest.raises(RuntimeError, match="no memory"):
        run_of(Manager("no memory")).run(give_up_after_s=1.0)


def test_all_requests_come_at_once_without_a_rate() -> None:
    at_once, spread = peer.workload_of(20, 0.0), peer.workload_of(20, 4.0)
    assert not at_once.arrival_s.any()
    assert spread.arrival_s[-1] > spread.arrival_s[0]
    assert (at_once.prompt_tokens == spread.prompt_tokens).all()
