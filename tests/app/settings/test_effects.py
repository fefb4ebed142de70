"""What another setting leaves without effect is refused by its name."""

from __future__ import annotations

from typing import Any

import pytest

from app.settings.effects import without_effect
from app.settings.load import parse, resolve
from app.settings.model_folder import SettingsError

DEMO = "configs/models/demo"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"telemetry": {"events": True}}, "telemetry.events: has no effect without `telemetry.dir"),
        ({"telemetry": {"events_gib": 3}}, "events_gib: has no effect without `telemetry.events`"),
        ({"kv": {"disk_cache_path": "x"}}, "kv.disk_cache_path: has no effect without `kv.disk_"),
        (
            {"kv": {"host_cache_gib": 1, "prefix_cache": False}},
            "kv.host_cache_gib: has no effect with `kv.prefix_cache: false`",
        ),
        (
            {"kv": {"memory_gib": 1, "memory_fraction": 0.5}},
            "kv.memory_fraction: has no effect with `kv.memory_gib`",
        ),
        (
            {"kv": {"swap_gib": 1}, "scheduling": {"swap": "never"}},
            "kv.swap_gib: has no effect with `scheduling.swap: never`",
        ),
        (
            {"model": {"path": DEMO, "seed": 7}},
            "model.seed: has no effect with `model.load_format: auto`",
        ),
        ({"parallel": {"symmetric_memory": True}}, "symmetric_memory: needs parallel.device: cuda"),
        (
            {"parallel": {"symmetric_memory": True, "device": "cuda"}},
            "symmetric_memory: needs parallel.device: cuda and parallel.tensor_ranks above 1",
        ),
    ],
)
def test_each_is_refused(args: dict[str, Any], message: str) -> None:
    settings = parse({"model": {"path": DEMO}, **args})
    ((key, why),) = without_effect(settings)
    assert message in f"{key}: {why}"
    with pytest.raises(SettingsError, match=f"^{key}: "):
        resolve(settings)


def test_defaults_and_what_works_are_none() -> None:
    args = {"kv": {"swap_gib": 1}, "parallel": {"device": "cuda", "gpus_per_rank": 0.5}}
    assert not list(without_effect(parse({"model": {"path": DEMO}})))
    assert not list(without_effect(parse({"model": {"path": DEMO}, **args})))
