"""What a loaded model says of itself; that it computes right, the tests of models show."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from actors.stage.loaded_model import load_model
from actors.stage.models.config import ModelError
from actors.stage.spec import StageSpec
from kernels.interface import AttentionShape
from kernels.registry import BackendError
from tests.actors.stage.greedy_reference import (
    GREEDY,
    expected,
    make_prompts,
    skip_unless_available,
)
from tests.actors.stage.mini_planner import MiniPlanner, make_chain


def test_a_block_of_its_cache_has_the_size_it_says(tiny_model: Callable[..., Path]) -> None:
    seen: list[float] = []
    spec = StageSpec(str(tiny_model("llama")), backend="torch", block_size=4, max_model_len=64)
    model = load_model(spec, seen.append)
    cache, states = model.make_cache(num_blocks=3, num_host_blocks=1)
    assert states is None
    assert cache.block_bytes == model.kv_block_bytes
    assert (model.max_model_len, model.dtype) == (64, torch.float32)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"dtype": "float8"}, "dtype 'float8' is not supported"),
     ({"kv_dtype": "int3"}, "kv.dtype: backend 'torch' has no 'int3'")],
)  # fmt: skip
def test_types_that_do_not_exist_are_refused(
    tiny_model: Callable[..., Path], wrong: dict[str, str], message: str
) -> None:
    spec = StageSpec(str(tiny_model("llama")), backend="torch", **wrong)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=message):
        load_model(spec, lambda _: None)


def test_heads_without_a_kernel_are_computed_by_the_next_backend(
    tiny_model: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    """As those of OpenLLaMA 3B, which have 100 features."""
    skip_unless_available("cpu")
    folder = tiny_model("llama", head_dim=20)
    with caplog.at_level(logging.INFO, logger="kernels.registry"):
        planner = MiniPlanner(make_chain(folder, backend="auto"))
    problem = "'cpu' is not available: head_dim must be a multiple of 8 up to 1024, not 20"
    assert problem in caplog.text
    assert planner.run(make_prompts(), GREEDY) == expected("llama", head_dim=20)
    read: list[float] = []
    with pytest.raises(BackendError, match=f"^parallel.backend: backend {problem}"):
        load_model(StageSpec(str(folder), backend="cpu"), read.append)
    assert not read


@pytest.mark.parametrize("variant", ["llama", "gpt-oss"])
@pytest.mark.parametrize("asked", [True, False])
def test_attention_of_every_layer_is_measured_before_the_cache_is_there(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, variant: str, asked: bool
) -> None:
    folder = str(tiny_model(variant))
    spec = StageSpec(folder, backend="torch", max_model_len=64, one_launch_attention=asked)
    model, calls = load_model(spec, lambda _: None), list[object]()
    allocate = model.backend.allocate_kv

    def measure(shapes: list[AttentionShape], *rest: object) -> None:
        calls.append([shape.sinks_N is not None for shape in shapes])

    def noted(*arguments: object) -> object:
        calls.append("allocate")
        return allocate(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(model.backend, "measure_attention", measure)
    monkeypatch.setattr(model.backend, "allocate_kv", noted)
    model.make_cache(num_blocks=3)
    kinds = [variant == "gpt-oss"] * model.config.num_layers
    assert calls == ([kinds, "allocate"] if asked else ["allocate"])
