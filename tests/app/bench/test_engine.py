"""The arithmetic of `legato bench engine`, `overhead` and `planning`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from actors.engine.config import EngineConfig, KVMemory
from actors.scheduling.config import SchedulerConfig
from actors.scheduling.cost.model import CostModel
from actors.stage.spec import StageSpec
from app.bench.ceilings import Ceilings
from app.bench.engine.cpu_usage import CpuUsage
from app.bench.engine.overhead import gaps_between_steps, overhead_figures
from app.bench.engine.planning import measure_step
from app.bench.engine.stage import BLOCK_SIZE, LoadedStage
from app.bench.engine.steps import StepCase, limit
from app.simulate.hardware.model_config import read_shape
from app.simulate.run.simulation import scheduler_config


def test_a_token_costs_what_the_idle_engine_does_not() -> None:
    idle = CpuUsage({"stage": 0.0, "replica": 0.2, "driver": 0.1}, span_s=10.0)
    load = CpuUsage({"stage": 4.0, "replica": 0.5, "driver": 0.05}, span_s=5.0)
    found = overhead_figures(idle, load, 1000, [0.001, 0.003, 0.002])
    assert found["cpu_us_per_token"] == pytest.approx(
        {"stage": 4000.0, "replica": 400.0, "driver": 0.0}
    )
    assert found["cpu_us_per_token_outside_stage"] == pytest.approx(400.0)
    assert found["load_percent_of_one_core_outside_stage"] == pytest.approx(11.0)
    assert found["idle_percent_of_one_core"] == pytest.approx(
        {"stage": 0.0, "replica": 2.0, "driver": 1.0}
    )
    assert found["gap_between_steps_ms_p50"] == pytest.approx(2.0)


def test_without_gaps_the_cpu_figures_stand_alone() -> None:
    usage = CpuUsage({"stage": 1.0}, span_s=1.0)
    assert math.isnan(overhead_figures(usage, usage, 10, [])["gap_between_steps_ms_p50"])


def test_gaps_lie_between_full_steps_that_follow_each_other() -> None:
    def record(
        step: int, requests: int, begin_s: float, end_s: float, drafts: int = 0, prefill: int = 0
    ) -> dict[str, Any]:
        return {
            "step": step, "num_requests": requests, "num_prefill_tokens": prefill,
            "num_decode_tokens": requests + drafts, "stages_s": [[begin_s, end_s]],
        }  # fmt: skip

    records = [
        record(0, 2, 0.0, 0.5, prefill=9),
        record(1, 1, 0.75, 1.0),  # not full
        record(2, 2, 1.5, 2.0, drafts=3),
        record(3, 2, 2.25, 3.0),
        record(5, 2, 9.0, 9.5),  # another came between
        record(6, 2, 9.75, 10.0),
    ]
    assert gaps_between_steps(records, 2) == [0.25, 0.25]


def test_planning_is_measured_on_a_busy_core() -> None:
    cost = measure_step("sarathi", 2, 1, num_events=4)
    assert (cost.num_running, cost.num_waiting, cost.num_stages) == (2, 1, 1)
    assert 0 < cost.p50_us <= cost.p99_us
    assert cost.ns_per_token > 0
    assert 0 < cost.lowest_ns_per_token <= cost.p99_us * 1000


def test_the_ceiling_that_binds_is_named() -> None:
    ceilings = Ceilings(bandwidth_gb_s=10.0, peak_gflop_s=100.0)
    assert ceilings.limit_s(1e9, 1e9) == pytest.approx(0.1)
    assert ceilings.bound(1e9, 1e9) == "memory"
    assert ceilings.limit_s(1e9, 1e11) == pytest.approx(1.0)
    assert ceilings.bound(1e9, 1e11) == "compute"


@pytest.mark.tensors
def test_a_step_reads_its_weights_once_and_each_context(tiny_model: Callable[..., Path]) -> None:
    stage = LoadedStage(
        tiny_model("llama"), backend="torch", dtype="float32", threads=1, max_requests=4,
        kv_tokens=2048,
    )  # fmt: skip
    memory_bound = Ceilings(bandwidth_gb_s=1e-9, peak_gflop_s=1e9)  # one byte a second
    one, _ = limit(stage, StepCase("", 1, 64), memory_bound)
    two, bound = limit(stage, StepCase("", 2, 64), memory_bound)
    more, _ = limit(stage, StepCase("", 2, 128), memory_bound)
    c = stage.config
    head_dim = c["hidden_size"] // c["num_attention_heads"]
    kv_bytes = 2 * 4 * c["num_hidden_layers"] * c["num_key_value_heads"] * head_dim  # a token
    assert bound == "memory"
    assert two - one == pytest.approx(64 * kv_bytes)
    assert more - two == pytest.approx(2 * 64 * kv_bytes)
    stage.runner.close()


@pytest.mark.tensors
def test_a_step_reads_only_the_experts_that_its_tokens_choose(
    tiny_model: Callable[..., Path],
) -> None:
    """2 of 4: one token reads two; two tokens three, as half of their choices fall together."""
    stage = LoadedStage(
        tiny_model("granite-moe"), backend="torch", dtype="float32", threads=1, max_requests=4,
        kv_tokens=2048,
    )  # fmt: skip
    one_byte, one_flop = Ceilings(1e-9, 1e9), Ceilings(1e9, 1e-9)  # a second
    c = stage.config
    expert = 3 * c["hidden_size"] * c["intermediate_size"]
    one, two = (limit(stage, StepCase("", n, 1), one_byte)[0] for n in (1, 2))
    kv_bytes = 2 * 4 * c["num_hidden_layers"] * c["num_key_value_heads"] * 16
    assert two - one - kv_bytes == pytest.approx(2 * c["num_hidden_layers"] * expert, rel=0.01)
    one, two = (limit(stage, StepCase("", n, 1), one_flop)[0] for n in (1, 2))
    assert two == pytest.approx(2 * one, rel=0.01)
    assert one > 2 * 2 * c["num_hidden_layers"] * expert
    stage.runner.close()


@pytest.mark.tensors
def test_a_step_reads_and_writes_the_states_of_its_requests(
    tiny_model: Callable[..., Path],
) -> None:
    """One of three layers has a KV cache; the two others have states of 2496 bytes."""
    stage = LoadedStage(
        tiny_model("qwen3-5"), backend="torch", dtype="float32", threads=1, max_requests=4,
        kv_tokens=2048,
    )  # fmt: skip
    one_byte = Ceilings(1e-9, 1e9)
    one, two = (limit(stage, StepCase("", n, 1), one_byte)[0] for n in (1, 2))
    assert two - one == pytest.approx(2 * 2 * 2496 + 2 * 4 * 2 * 16)
    stage.runner.close()


@pytest.mark.tensors
@pytest.mark.parametrize(
    "variant",
    ["qwen3-5-images", "qwen3-next", "lfm2-adjusted", "lfm2-moe", "granite-4", "granite-4-dense",
     "bamba"],
)  # fmt: skip
def test_states_that_the_simulator_reads_from_a_config_are_those_of_the_engine(
    tiny_model: Callable[..., Path], variant: str
) -> None:
    """With as many weights and KV of a token, so that as many requests and blocks fit."""
    folder = tiny_model(variant)
    shape = read_shape(folder / "config.json")
    stage = LoadedStage(
        folder, backend="torch", threads=1, max_requests=4, kv_tokens=2048, max_model_len=4096
    )
    info = stage.info
    assert shape.state_bytes == info.state_bytes > 0
    assert shape.kv_bytes_per_token * BLOCK_SIZE == info.kv_block_bytes
    stage.runner.close()
    stored = load_file(folder / "model.safetensors")
    others = ("embed", "lm_head", "conv1d", "conv.conv", "visual")
    matrices = [t.numel() for name, t in stored.items() if not any(o in name for o in others)]
    vocabulary = 2 * 2 * shape.vocab * shape.hidden
    assert shape.weight_bytes - vocabulary == pytest.approx(2 * sum(matrices), rel=0.02)

    room = 41 * info.state_bytes
    model = CostModel(
        "m", ((1, 1.0),), kv_tokens=int(room / shape.kv_bytes_per_token),
        state_tokens=math.ceil(shape.state_bytes / shape.kv_bytes_per_token), max_model_len=4096,
    )  # fmt: skip
    for asked in (8, 128):
        scheduler = SchedulerConfig(num_blocks=1, max_requests=asked, max_model_len=4096)
        engine = EngineConfig(StageSpec(""), scheduler, KVMemory(fraction=1.0))
        live = engine.cache_sizes([replace(info, available_bytes=room)])
        simulated = scheduler_config(model, max_requests=asked)
        assert simulated.max_requests == live.num_requests == min(asked, 20)
        assert simulated.num_blocks == pytest.approx(live.num_blocks, rel=0.05)


@pytest.mark.tensors
def test_a_layer_without_an_mlp_reads_none(tiny_model: Callable[..., Path]) -> None:
    """What is counted is what is stored, but for norms, convolutions and the embedding."""
    folder = tiny_model("nemotron-h")
    stage = LoadedStage(
        folder, backend="torch", dtype="float32", threads=1, max_requests=4, kv_tokens=2048
    )
    stored = load_file(folder / "model.safetensors")
    matrices = [t.numel() for name, t in stored.items() if t.dim() == 2 and "embed" not in name]
    found = limit(stage, StepCase("", 1, 0), Ceilings(1e9, 1e-9))[0]  # a FLOP a second
    assert found == pytest.approx(2 * sum(matrices))
    stage.runner.close()
