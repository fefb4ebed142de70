"""What an engine's settings become once its stages are loaded."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from actors.engine.config import GIB, EngineConfig, KVMemory
from actors.scheduling.config import SchedulerConfig
from actors.stage.spec import StageInfo, StageSpec


def test_drafts_of_the_default_end_with_a_backend_that_rounds_by_batch() -> None:
    """As where the CPU library does not load and `auto` takes torch."""
    scheduler = SchedulerConfig(num_blocks=1, drafter="auto", max_drafts=4)
    asked = EngineConfig(StageSpec("somewhere"), scheduler)
    default = replace(asked, drafts_if_exact=True)
    assert default.scheduler_on("cpu") == scheduler
    for backend in ("torch", "triton", "flash_attn"):
        plain = default.scheduler_on(backend)
        plain.check()
        assert plain == replace(scheduler, drafter="none", max_drafts=None)
        assert asked.scheduler_on(backend) == scheduler


def test_fewer_requests_for_now_leave_the_next_scheduler_its_kv_cache() -> None:
    scheduler = SchedulerConfig(num_blocks=1, block_size=16, max_model_len=512, max_requests=8)
    config = EngineConfig(StageSpec("somewhere"), scheduler)
    info = StageInfo(64, 100, 512, "float32", "cpu", 1 << 20, 1 << 40, (2,), 10**6)
    assert config.cache_sizes([info]).num_blocks == 8 * 32 + 1
    assert config.with_changes({"max_requests": 2}).cache_sizes([info]).num_blocks == 8 * 32 + 1


@pytest.mark.parametrize(
    ("device", "changes", "num_blocks"),
    [
        ("cuda", {"gpus_per_rank": 1.0}, 900),  # each rank has a GPU of its own
        ("cuda", {"gpus_per_rank": 2.0}, 900),
        ("cuda", {"gpus_per_rank": 0.5}, 360),  # both see the same memory as free
        ("cuda", {"gpus_per_rank": 0.0}, 900),  # Ray counts none
        ("cpu", {}, 450),
        ("cpu", {"direct_gib": 100 / 1024}, 350),  # blocks for other engines' devices, beside it
        ("cuda", {"gpus_per_rank": 1.0, "direct_gib": 2.0}, 2),
        ("cuda", {"gpus_per_rank": 0.5, "gib": 0.5}, 512),
    ],
)
def test_ranks_that_share_memory_take_parts_of_it(
    device: str, changes: dict[str, float], num_blocks: int
) -> None:
    scheduler = SchedulerConfig(num_blocks=1, block_size=16, max_model_len=4096, max_requests=8)
    gpus = changes.pop("gpus_per_rank", 0.0)
    config = EngineConfig(
        StageSpec("somewhere", device=device), scheduler, KVMemory(fraction=0.9, **changes),
        gpus_per_rank=gpus,
    )  # fmt: skip
    info = StageInfo(64, 100, 2048, "float32", "cpu", 1 << 20, 1000 << 20, (2,), 10**6)
    if device == "cuda":
        info = replace(info, device_bytes=1200 << 20, own_bytes=200 << 20)
    assert config.cache_sizes([info, info]).num_blocks == num_blocks


def test_replicas_of_one_gpu_have_the_same_cache_in_whichever_order_they_start() -> None:
    scheduler = SchedulerConfig(num_blocks=1, block_size=16, max_model_len=4096, max_requests=8)
    config = EngineConfig(
        StageSpec("somewhere", device="cuda"), scheduler, KVMemory(fraction=0.9), gpus_per_rank=0.5
    )
    total, own, taken, found = 2000, 300, 0, []
    for _ in range(2):
        info = StageInfo(
            64, 100, 2048, "float32", "triton", 1 << 20, (total - taken - own) << 20, (2,), 10**6,
            device_bytes=total << 20, own_bytes=own << 20,
        )  # fmt: skip
        found.append(config.cache_sizes([info]).num_blocks)
        taken += own + found[-1]
    assert found == [630, 630]
    late = replace(info, available_bytes=100 << 20)  # others have taken more than their part
    assert config.cache_sizes([late]).num_blocks == 90


def test_a_part_of_a_gpu_that_does_not_hold_the_weights_is_refused() -> None:
    """As where `gpus_per_rank` is meant for Ray's count only: requests would find two blocks."""
    scheduler = SchedulerConfig(num_blocks=1, block_size=16, max_model_len=4096, max_requests=8)
    config = EngineConfig(
        StageSpec("somewhere", device="cuda"), scheduler, KVMemory(fraction=0.9), gpus_per_rank=0.1
    )
    roomy = StageInfo(
        64, 100, 2048, "float32", "triton", 1 << 20, 60 * GIB, (2,), 10**6,
        device_bytes=80 * GIB, own_bytes=6 * GIB,
    )  # fmt: skip
    full = replace(roomy, own_bytes=16 * GIB)
    most = 8 * 256 + 1
    assert config.cache_sizes([roomy, roomy]).num_blocks == 1843
    problem = "a part of 8.00 GiB, but the weights and the largest step take 16.00 GiB"
    with pytest.raises(ValueError, match=rf"^parallel\.gpus_per_rank: {problem} "):
        config.cache_sizes([roomy, full])
    assert config.cache_sizes([full], is_rebuild=True).num_blocks == 2
    assert replace(config, is_rebuild=True).cache_sizes([full]).num_blocks == 2
    for whole in (0.0, 1.0, 2.0):
        assert replace(config, gpus_per_rank=whole).cache_sizes([full]).num_blocks == most
    assert replace(config, kv=KVMemory(gib=40.0)).cache_sizes([full]).num_blocks == most


def test_a_cache_beyond_the_free_memory_is_refused_on_gpus_and_noted_on_cpus(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What a machine has free is a guess: memory of files counts in part. A GPU's is exact."""
    scheduler = SchedulerConfig(num_blocks=1, block_size=16, max_model_len=4096, max_requests=8)
    config = EngineConfig(StageSpec("somewhere"), scheduler, KVMemory(gib=1.5))
    info = StageInfo(64, 100, 2048, "float32", "cpu", 1 << 20, 1 << 30, (2,), 10**6)
    with caplog.at_level(logging.WARNING):
        assert config.cache_sizes([info]).num_blocks == 1536
    problem = "kv.memory_gib: 1.5 GiB, but 1.00 GiB are free"
    assert problem in caplog.text
    on_gpu = replace(config, stage=StageSpec("somewhere", device="cuda"))
    with pytest.raises(ValueError, match=f"^{problem}$"):
        on_gpu.cache_sizes([info])
    assert on_gpu.cache_sizes([info], is_rebuild=True).num_blocks == 1536
    assert replace(on_gpu, is_rebuild=True).cache_sizes([info]).num_blocks == 1536
    fits = replace(on_gpu, kv=KVMemory(gib=80.0), scheduler=replace(scheduler, max_requests=2))
    assert fits.cache_sizes([info]).num_blocks == 2 * 256 + 1  # no more can be used


def test_a_request_may_have_what_the_kv_cache_holds(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = SchedulerConfig(num_blocks=1, block_size=16, max_model_len=4096)
    config = EngineConfig(StageSpec("somewhere"), scheduler)
    info = StageInfo(64, 100, 2048, "float32", "cpu", 1 << 10, 1 << 30, (2,), 10**6)
    assert config.max_model_len(info, 128) == 2048
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert config.max_model_len(info, 127) == 127 * 16
    assert "holds 2032 tokens" in caplog.text
    assert config.max_model_len(info, 127, in_fleet=True) == 2048
    named = replace(config, whole_context=True)
    assert named.max_model_len(info, 128) == 2048
    with pytest.raises(ValueError, match=r"model.max_model_len: the KV cache holds 2032 tokens"):
        named.max_model_len(info, 127)


def test_states_take_at_most_half_of_the_memory() -> None:
    """Of that for KV, or of what is free beside `kv.memory_gib`."""
    scheduler = SchedulerConfig(num_blocks=1, block_size=16, max_model_len=4096, max_requests=64)
    config = EngineConfig(StageSpec("somewhere"), scheduler, KVMemory(fraction=0.5))
    first = StageInfo(64, 100, 4096, "float32", "cpu", 1 << 20, 1600 << 20, (2,), 10**6)
    second = replace(first, kv_block_bytes=0, state_bytes=10 << 20)  # of a stage without attention
    sizes = config.cache_sizes([replace(first, state_bytes=5 << 20), second])
    assert sizes.num_requests == 20  # half of 400 MiB, of 10 MiB each
    assert sizes.num_blocks == 400 - 20 * 5
    assert config.cache_sizes([second, second]).num_blocks == 20 * 256 + 1
    exact = replace(config, kv=KVMemory(gib=1.0))
    assert exact.cache_sizes([replace(first, state_bytes=4 << 20)]) == (1024, 0, 64)
    assert exact.cache_sizes([replace(first, state_bytes=8 << 20)]) == (1024, 0, 36)


def test_fewer_requests_than_asked_for_are_explained(caplog: pytest.LogCaptureFixture) -> None:
    """What takes the memory, how many fit, and which setting makes room."""
    scheduler = SchedulerConfig(num_blocks=1, block_size=16, max_model_len=4096, max_requests=64)
    config = EngineConfig(StageSpec("somewhere"), scheduler, KVMemory(fraction=0.5))
    info = StageInfo(
        64, 100, 4096, "float32", "cpu", 1 << 20, 1600 << 20, (2,), 10**6, state_bytes=16 << 20
    )
    with caplog.at_level(logging.WARNING):
        assert config.cache_sizes([info]).num_requests == 25
        assert replace(config, kv=KVMemory(gib=1.0)).cache_sizes([info]).num_requests == 18
        assert config.cache_sizes([info], is_rebuild=True).num_requests == 25
    by_fraction, by_size = caplog.messages
    start = (
        "Layers with a state, a draft model's too, keep 16.0 MiB for each request, 1024 MiB for "
        "64, and states may "
    )
    assert by_fraction == (
        f"scheduling.max_requests: 25, not 64. {start}take half of the 800 MiB that "
        "kv.memory_fraction (0.5) gives to states and KV cache; kv.memory_fraction raises that, "
        "and max_requests: 25 accepts it"
    )
    assert by_size == (
        f"scheduling.max_requests: 18, not 64. {start}take half of the 576 MiB that kv.memory_gib "
        "(1) leaves free; a smaller kv.memory_gib raises that, and max_requests: 18 accepts it"
    )
    caplog.clear()
    assert config.cache_sizes([replace(info, state_bytes=0)]).num_requests == 64
    assert not caplog.records
