"""What another setting leaves without effect is refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.settings.effects import without_effect
from app.settings.filled_in import filled_in
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


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"kv": {"swap_gib": 1}}, "kv.swap_gib: has no effect with Qwen3_5ForCausalLM"),
        ({"kv": {"host_cache_gib": 1}}, "kv.host_cache_gib: has no effect with Qwen3_5ForCausalLM"),
        (
            {"scheduling": {"swap": "always"}},
            "scheduling.swap: has no effect with Qwen3_5ForCausalLM",
        ),
    ],
)
def test_what_kv_alone_cannot_do_where_layers_keep_states(
    tiny_model: Callable[..., Path], args: dict[str, Any], message: str
) -> None:
    model = {"path": str(tiny_model("qwen3-5"))}
    with pytest.raises(SettingsError, match=message):
        resolve(parse({"model": model, **args}))


def test_models_with_states_need_no_setting(tiny_model: Callable[..., Path]) -> None:
    model = {"path": str(tiny_model("qwen3-5"))}
    scheduler = resolve(parse({"model": model})).scheduler
    assert (scheduler.prefix_cache, scheduler.swap) == (True, "never")
    assert scheduler.num_saved_states == 0
    shown = filled_in({"model": model})  # as `legato config show` prints it
    assert resolve(parse(shown)).scheduler == scheduler


def test_a_model_with_states_takes_adapters(tiny_model: Callable[..., Path]) -> None:
    args = {"model": {"path": str(tiny_model("qwen3-5"))}, "adapters": {"max_adapters": 2}}
    assert resolve(parse(args)).stage.max_adapters == 2


def test_a_model_with_states_takes_drafts(tiny_model: Callable[..., Path]) -> None:
    model, drafts = {"path": str(tiny_model("qwen3-5"))}, str(tiny_model("llama"))
    parallel = {"backend": "cpu"}  # which is exact, whether or not it is here
    scheduler = resolve(parse({"model": model, "parallel": parallel})).scheduler
    assert scheduler.drafter == "auto"
    speculation = {"drafter": "model", "model": drafts}
    scheduler = resolve(parse({"model": model, "speculation": speculation})).scheduler
    assert (scheduler.drafter, scheduler.draft_model) == ("model", drafts)


@pytest.mark.parametrize("variant", ["llama", "qwen3-5"])
def test_a_model_with_states_drafts(tiny_model: Callable[..., Path], variant: str) -> None:
    """Whether states are saved is a matter of the served model alone."""
    model, drafts = {"path": str(tiny_model(variant))}, str(tiny_model("lfm2"))
    speculation = {"drafter": "model", "model": drafts}
    scheduler = resolve(parse({"model": model, "speculation": speculation})).scheduler
    assert scheduler.draft_model == drafts
    assert scheduler.num_saved_states == (None if variant == "llama" else 0)


def test_models_with_states_have_room_for_drafts_or_say_that_they_have_none(
    tiny_model: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Their steps hold drafts only beside a decode of each request that may run."""
    args: dict[str, Any] = {"model": {"path": str(tiny_model("qwen3-5"))}}
    args["parallel"] = {"backend": "cpu"}
    many = {"max_requests": 9000}
    chosen = resolve(parse({**args, "scheduling": many})).scheduler
    assert (chosen.drafter, chosen.max_step_tokens) == ("auto", 9008)
    tight = {"max_requests": 64, "max_step_tokens": 64}
    with caplog.at_level("WARNING", "legato.settings"):
        chosen = resolve(parse({**args, "scheduling": tight})).scheduler
    assert (chosen.drafter, chosen.max_step_tokens) == ("none", 64)
    assert "max_step_tokens: 64 leaves no room for drafts beside 64 requests" in caplog.text
    for asked in ({"drafter": "lookup"}, {"max_drafts": 4}):
        with pytest.raises(SettingsError, match=r"scheduling\.max_step_tokens: 64 leaves no room"):
            resolve(parse({**args, "scheduling": tight, "speculation": asked}))
    scheduling = {**tight, "max_step_tokens": 65}
    assert resolve(parse({**args, "scheduling": scheduling})).scheduler.drafter == "auto"
    args["model"] = {"path": str(tiny_model("llama"))}
    assert resolve(parse({**args, "scheduling": tight})).scheduler.drafter == "auto"
