"""A backend is one class and one row: everything that it does not override is torch's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from actors.scheduling.plan import RequestStart, Slice, StepPlan, StepResult
from actors.scheduling.request import SamplingParams
from actors.stage.models.config import ModelError
from kernels import registry
from kernels.sampling import SamplingRows
from kernels.torch.backend import TorchBackend
from tests.actors.stage.mini_planner import make_runner

START = RequestStart(1, (5, 6, 7), 3, (0,), SamplingParams(max_tokens=2))


class SevenBackend(TorchBackend):
    """Draws token 7 from any logits; has a cache in half precision by a name of its own."""

    name = "seven"
    kv_dtypes: ClassVar[dict[str, torch.dtype]] = {"half": torch.float16}

    def unsupported(
        self, dtype: torch.dtype, block_size: int | None = None, head_dim: int | None = None
    ) -> str | None:
        return None if dtype == torch.float32 else f"it computes in float32, not {dtype}"

    def sample(self, logits_SV: torch.Tensor, rows: SamplingRows) -> NDArray[np.int64]:
        return np.full(len(logits_SV), 7)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = registry.BackendEntry(f"{__name__}:SevenBackend", ("cpu",))
    monkeypatch.setitem(registry.BACKENDS, "seven", entry)


def test_a_step_runs_on_a_backend_of_one_row(
    tiny_model: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="kernels.registry"):
        runner = make_runner(tiny_model("llama"), backend="seven", kv_dtype="half")
    assert "backend seven computes on cpu in torch.float32, as asked" in caplog.text
    first = runner.execute(StepPlan(0, (Slice(1, 0, 3, True),), started=(START,)), None)
    second = runner.execute(StepPlan(1, (Slice(1, 3, 1, True),)), None)
    assert isinstance(first, StepResult)
    assert isinstance(second, StepResult)
    assert first.tokens == second.tokens == ((1, 7),)
    whole = make_runner(tiny_model("llama"), backend="seven")
    assert runner.info.kv_block_bytes * 2 == whole.info.kv_block_bytes


def test_what_it_cannot_compute_is_refused(tiny_model: Callable[..., Path]) -> None:
    message = r"^parallel.backend: .*'seven' is not available: it computes in float32, not torch.bf"
    with pytest.raises(registry.BackendError, match=message):
        make_runner(tiny_model("llama"), backend="seven", dtype="bfloat16")


def test_a_quantization_that_it_lacks_is_named(tiny_model: Callable[..., Path]) -> None:
    for quantization in ("fp8", "w8a8"):
        message = (
            f"model.quantization: backend 'seven' has no '{quantization}'; it has none, int8, int4"
        )
        with pytest.raises(ModelError, match=message):
            make_runner(tiny_model("llama"), backend="seven", quantization=quantization)


def test_auto_takes_the_first_that_has_the_cache_asked_for(tiny_model: Callable[..., Path]) -> None:
    """As on a GPU with blocks of 256, where flash-attn comes first and has no float8 cache."""
    runner = make_runner(tiny_model("llama"), backend="auto", kv_dtype="half")
    assert runner.info.backend == "seven"
    with pytest.raises(registry.BackendError, match=r"^kv.dtype: .* a KV cache of dtype 'fp8'"):
        make_runner(tiny_model("llama"), backend="auto", kv_dtype="fp8")
