"""A setting is declared once: the YAML's schema, the checks and the live keys agree with it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from actors.scheduling.config import LIVE_KEYS, SETTINGS, ConfigError, SchedulerConfig
from app.settings.load import parse, resolve
from app.settings.model_folder import SettingsError
from app.settings.schema import Settings

DEMO = "configs/models/demo"
MODEL = {"model": {"path": DEMO}}
LIVE = {
    "policy", "policy_options", "order", "order_options", "budget", "budget_options", "admission",
    "admission_options", "token_budget", "tile", "max_chunk", "max_requests", "micro_batches",
    "watermark", "tbt_ms", "ttft_ms", "max_queued_requests", "max_queued_tokens",
    "max_running_per_tenant", "max_queued_per_tenant", "queue_timeout_s",
}  # fmt: skip


def section(name: str) -> Any:
    return Settings.model_fields[name].annotation


def test_what_operators_change_live_stays_live() -> None:
    assert set(LIVE_KEYS) >= LIVE


def test_every_setting_that_is_not_hidden_is_in_its_section() -> None:
    default = SchedulerConfig(num_blocks=1)
    shown = {n: s for n, s in SETTINGS.items() if not s.hidden}
    assert {"policy", "tbt_s", "block_size", "cost_model"} <= shown.keys()
    for name, setting in shown.items():
        field = section(setting.section).model_fields[setting.key(name)]
        assert field.description == setting.description
        assert field.get_default(call_default_factory=True) == setting.in_yaml(
            getattr(default, name)
        )
    hidden = SETTINGS.keys() - shown.keys()
    assert not hidden & section("scheduling").model_fields.keys()


def test_a_step_that_is_named_holds_the_budget_and_all_decodes() -> None:
    sizes = {"max_step_tokens": 71, "token_budget": 64, "max_requests": 8}
    with pytest.raises(SettingsError, match=r"^scheduling\.max_step_tokens: less than the 72 of"):
        resolve(parse({**MODEL, "scheduling": sizes}))
    del sizes["max_step_tokens"]
    sizes["token_budget"] = 10_000
    scheduler = resolve(parse({**MODEL, "scheduling": sizes})).scheduler
    assert scheduler.max_step_tokens == 10_008


def test_values_reach_the_scheduler_in_its_own_units() -> None:
    scheduler = resolve(
        parse(
            {
                **MODEL,
                "scheduling": {"token_budget": 64, "max_requests": 8, "swap": "never"},
                "slo": {"tbt_ms": 50, "ttft_ms": None, "delivery_ms": 2},
                "kv": {"block_size": 32, "prefix_cache": False},
                "parallel": {"pipeline_stages": 2},
            }
        )
    ).scheduler
    assert (scheduler.token_budget, scheduler.max_requests, scheduler.swap) == (64, 8, "never")
    assert (scheduler.tbt_s, scheduler.ttft_s, scheduler.delivery_s) == (0.05, None, 0.002)
    assert resolve(parse(MODEL)).scheduler.delivery_s == SchedulerConfig(1).delivery_s == 0.003
    assert (scheduler.block_size, scheduler.prefix_cache, scheduler.num_stages) == (32, False, 2)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("token_budget", 0, "token_budget: must be at least 1, not 0"),
        ("token_budget", 1.5, "token_budget: must be an integer or null, not 1.5"),
        ("max_running_per_tenant", 0, "max_running_per_tenant: must be at least 1, not 0"),
        ("queue_timeout_s", 0, "queue_timeout_s: must be above 0, not 0"),
        ("watermark", 1.0, "watermark: must be below 1, not 1.0"),
        ("watermark", float("nan"), "watermark: must be finite, not nan"),
        ("tbt_s", -0.05, "tbt_ms: must be above 0, not -50"),
        ("swap", "sometimes", "swap: unknown 'sometimes'; known: always, auto, never"),
        ("lookahead", 1, "lookahead: must be true or false, not 1"),
        ("num_blocks", 0, "num_blocks: must be at least 1, not 0"),
    ],
)
def test_the_core_refuses_what_the_schema_refuses(field: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SchedulerConfig(**{"num_blocks": 1, field: value}).check()
    assert str(caught.value) == message
    setting = SETTINGS[field]
    if not setting.hidden and field != "lookahead":  # YAML's 1 is pydantic's true
        given = 1000 * value if setting.milliseconds else value
        with pytest.raises(SettingsError, match=f"^{setting.section}.{setting.key(field)}: "):
            parse({**MODEL, setting.section: {setting.key(field): given}})


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("scheduling.token_budge", "unknown setting; did you mean 'token_budget'?"),
        ("lookahead", "fixed while the engine runs"),
        ("kv.block_size", "fixed while the engine runs"),
        ("nonsense", "unknown setting"),
    ],
)
def test_a_live_change_of_another_key_says_why_not(key: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SchedulerConfig(num_blocks=1).with_changes({key: 1})
    assert str(caught.value) == f"{key}: {message}"


def test_time_for_the_way_to_the_client_is_refused_where_no_budget_leaves_it() -> None:
    with pytest.raises(SettingsError, match=r"^slo.delivery_ms: has no effect with the budget"):
        resolve(parse({**MODEL, "slo": {"delivery_ms": 5}, "scheduling": {"budget": "fixed"}}))


@pytest.mark.parametrize("slo", ["relaxed", {"tbt_rule": "relaxed", "ttft_ms": 2000}])
def test_an_objective_by_rule_has_steps_measured(slo: Any) -> None:
    fixed = {"token_budget": 64}
    engine = resolve(parse({**MODEL, "slo": slo, "scheduling": fixed}))
    assert engine.scheduler.tbt_rule == "relaxed"
    assert engine.calibrate
    assert not resolve(parse({**MODEL, "scheduling": fixed})).calibrate


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"slo": "lax"}, "slo.tbt_rule: Input should be 'strict' or 'relaxed'"),
        ({"slo": {"tbt_rule": "strict", "tbt_ms": 50}}, "slo.tbt_rule: has no effect with"),
        ({"slo": "strict", "engine": {"calibrate": False}}, "slo.tbt_rule: needs `engine.cal"),
    ],
)
def test_a_rule_that_gives_no_objective_is_refused(args: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        resolve(parse({**MODEL, **args}))


@pytest.mark.parametrize(
    ("parallel", "speculation", "drafter"),
    [
        ({}, {}, "auto"),
        ({"device": "cpu", "backend": "cpu", "pipeline_stages": 2}, {"max_drafts": 4}, "auto"),
        ({"backend": "torch"}, {}, "none"),
        ({"device": "cuda"}, {}, "none"),
        ({"device": "cuda"}, {"drafter": "auto"}, "auto"),
        ({"backend": "torch"}, {"drafter": "lookup"}, "lookup"),
        ({}, {"drafter": "none"}, "none"),
    ],
)
def test_the_default_drafter_is_for_batch_invariant_backends(
    parallel: dict[str, Any], speculation: dict[str, Any], drafter: str
) -> None:
    engine = resolve(parse({**MODEL, "parallel": parallel, "speculation": speculation}))
    assert engine.scheduler.drafter == drafter
    assert engine.scheduler.max_drafts == speculation.get("max_drafts")
    assert engine.drafts_if_exact == ("drafter" not in speculation)


@pytest.mark.parametrize(
    ("parallel", "speculation"),
    [({"backend": "torch"}, {"max_drafts": 4}), ({}, {"drafter": "none", "max_drafts": 4})],
)
def test_a_number_of_drafts_without_a_drafter_is_refused(
    parallel: dict[str, Any], speculation: dict[str, Any]
) -> None:
    with pytest.raises(SettingsError, match=r"^speculation\.max_drafts: has no effect with"):
        resolve(parse({**MODEL, "parallel": parallel, "speculation": speculation}))


def test_only_a_drafter_that_is_asked_for_has_steps_measured() -> None:
    fixed = {**MODEL, "scheduling": {"token_budget": 64}}
    default = resolve(parse(fixed))
    assert (default.scheduler.drafter, default.calibrate) == ("auto", False)
    for drafter, calibrates in (("auto", True), ("lookup", False), ("none", False)):
        asked = resolve(parse({**fixed, "speculation": {"drafter": drafter}}))
        assert asked.calibrate is calibrates


def test_a_second_tier_reaches_the_engine() -> None:
    kv = {"host_cache_gib": 2, "disk_cache_gib": 0.5, "disk_cache_path": "/somewhere"}
    engine = resolve(parse({**MODEL, "kv": kv}))
    assert engine.kv.has_tier
    assert engine.kv.disk_cache_path == "/somewhere"
    assert not resolve(parse(MODEL)).kv.has_tier


@pytest.mark.parametrize(
    ("kv", "key"),
    [
        ({"disk_cache_path": "/somewhere"}, "disk_cache_path"),
        ({"host_cache_gib": 1, "prefix_cache": False}, "host_cache_gib"),
        ({"disk_cache_gib": 1, "prefix_cache": False}, "disk_cache_gib"),
        ({"disk_cache_gib": -1}, "disk_cache_gib"),
        ({"shared_cache_path": "/somewhere"}, "shared_cache_path"),
        ({"shared_cache_gib": 1}, "shared_cache_gib"),
    ],
)
def test_a_second_tier_that_says_nothing_is_refused(kv: dict[str, Any], key: str) -> None:
    with pytest.raises(SettingsError, match=f"^kv.{key}: "):
        resolve(parse({**MODEL, "kv": kv}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scheduling": {"token_budge": 64}}, "scheduling.token_budge: unknown setting; did you"),
        ({"scheduling": {"policy": "sarathy"}}, "unknown 'sarathy'; known: chunked_only"),
        ({"scheduling": {"budget": "y"}}, "scheduling.budget: unknown 'y'; known: adaptive, "),
        ({"scheduling": {"admission": "z"}}, "scheduling.admission: unknown 'z'; known: all, "),
        (
            {"scheduling": {"budget_options": {"ease": 7}}},
            "scheduling.budget_options: ease must lie between 0 and 1, not 7",
        ),
        (
            {"scheduling": {"budget_options": {"ease": 0.9}}, "engine": {"calibrate": False}},
            "scheduling.budget_options: ease has no effect without a cost model",
        ),
        (
            {"scheduling": {"budget_options": {"foo": 1}}},
            "scheduling.budget_options: unknown 'foo'; auto has allowed_misses, ",
        ),
        (
            {"scheduling": {"policy_options": {"foo": 1}}},
            "scheduling.policy_options: unknown 'foo'; sarathi has chunks, high, low, num_sizes",
        ),
        ({"scheduling": {"budget": "profiled"}}, "slo.tbt_ms: a profiled budget needs an object"),
        (
            {"scheduling": {"admission": "predictive"}, "engine": {"calibrate": False}},
            "scheduling.admission: predictive needs `engine.calibrate` or `scheduling.cost_model`",
        ),
        ({"parallel": {"cpus_per_rank": math.inf}}, "parallel.cpus_per_rank: "),
        ({"parallel": {"threads_per_rank": 257}}, "parallel.threads_per_rank: "),
        ({"kv": {"swap_gib": math.inf}}, "kv.swap_gib: "),
        ({"kv": {"memory_gib": math.nan}}, "kv.memory_gib: "),
        ({"engine": {"step_deadline_s": math.inf}}, "engine.step_deadline_s: "),
        ({"fleet": {"start_within_s": math.inf}}, "fleet.start_within_s: "),
        ({"batches": {"max_gib_per_key": math.inf}}, "batches.max_gib_per_key: "),
        ({"slo": {"tbt_ms": math.inf}}, "slo.tbt_ms: "),
        ({"api": {"send_timeout_s": math.inf}}, "api.send_timeout_s: "),
        (
            {"scheduling": {"max_requests": 10**8}},
            "scheduling.max_requests: Input should be less than or equal to 65536",
        ),
        ({"scheduling": {"max_step_tokens": 10**9}}, "scheduling.max_step_tokens: "),
        ({"scheduling": {"token_budget": 10**9}}, "scheduling.token_budget: "),
        ({"listen": "8000"}, "listen: must be host:port, such as 127.0.0.1:8000, not '8000'"),
        ({"parallel": {"pipeline_stages": 99}}, "parallel.pipeline_stages: 99 stages for"),
        ({"model": {"path": "no/such/folder"}}, "model.path: no folder 'no/such/folder'"),
        ({"slo": {"tbt_ms": -5}}, "slo.tbt_ms"),
        (
            {"parallel": {"one_launch_attention": False}},
            "one_launch_attention: has no effect without parallel.device: cuda",
        ),
        (
            {"parallel": {"one_launch_attention": False, "device": "cuda", "backend": "torch"}},
            "and parallel.backend: triton or auto",
        ),
        (
            {"parallel": {"activations": "accelerator"}},
            "accelerator needs parallel.device: cuda and",
        ),
        ({"batches": {"max_lines": 0}}, "batches.max_lines: "),
        ({"batches": {"max_file_mib": 2000}}, "max_file_mib: 2000 MiB exceed what a key may keep"),
        ({"batches": {"max_line": 3}}, "unknown setting; did you mean 'max_lines'"),
        ({"fleet": {"routin": "slack"}}, "fleet.routin: unknown setting; did you mean 'routing'"),
        ({"api": {"max_m": 3}}, "api.max_m: unknown setting; did you mean 'max_n'"),
        ({"api": {"max_connections": 0}}, "api.max_connections: "),
        ({"api": {"body_timeout_s": 0}}, "api.body_timeout_s: "),
        ({"api": {"api_keys": {"k": {"tokens_per_minute": float("inf")}}}}, "tokens_per_minute: "),
        (
            {"api": {"api_keys": {"k": {"admins": True}}}},
            "key-8254c329.admins: unknown setting",
        ),
    ],
)
def test_wrong_settings_are_named(changes: dict[str, object], message: str) -> None:
    args = {"model": {"path": "configs/models/demo"}, **changes}
    with pytest.raises(SettingsError) as caught:
        resolve(parse(args))
    assert message in str(caught.value)


def test_logs_may_be_below_the_home_folder() -> None:
    """No shell has seen the path."""
    engine = resolve(parse({**MODEL, "telemetry": {"directory": "~/logs", "events": True}}))
    assert engine.event_log == str(Path.home() / "logs")


def test_a_draft_model_reaches_the_engine() -> None:
    """A folder alone is used by the default drafter, which then has steps measured."""
    fixed = {**MODEL, "scheduling": {"token_budget": 64}}
    for speculation, drafter, most in (
        ({"model": DEMO}, "auto", 8),
        ({"drafter": "model", "model": DEMO, "max_drafts": 3}, "model", 3),
    ):
        engine = resolve(parse({**fixed, "speculation": speculation}))
        assert engine.scheduler.drafter == drafter
        assert engine.stage.draft_model_path == str(Path(DEMO).resolve())
        assert engine.stage.max_drafts == most
        assert engine.calibrate
    assert resolve(parse(fixed)).stage.draft_model_path is None


@pytest.mark.parametrize(
    ("speculation", "parallel", "message"),
    [
        ({"drafter": "lookup", "model": DEMO}, {}, "model: has no effect with `speculation.draf"),
        ({"drafter": "none", "model": DEMO}, {}, "model: has no effect with `speculation.draf"),
        ({"drafter": "model"}, {}, "drafter: model needs a folder, `speculation.model`"),
        ({"model": "/no/such/folder"}, {}, "model: no folder '/no/such/folder'"),
        ({"model": "configs"}, {}, "model: 'configs' holds no config.json"),
        ({"model": DEMO}, {"device": "cuda"}, "model: needs parallel.device: cpu"),
    ],
)
def test_a_draft_model_that_cannot_be_used_is_refused(
    speculation: dict[str, Any], parallel: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=rf"^speculation\.{re.escape(message)}"):
        resolve(parse({**MODEL, "parallel": parallel, "speculation": speculation}))


def test_a_draft_model_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    config = json.loads(Path(DEMO, "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
    args = {**MODEL, "speculation": {"model": str(tmp_path)}}
    with pytest.raises(
        SettingsError, match=r"^speculation\.model: .* has 300 tokens, the model 40"
    ):
        resolve(parse(args))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert resolve(parse(args)).stage.draft_model_path == str(tmp_path)
    tokenizer = json.loads(Path(DEMO, "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["another"] = tokenizer["model"]["vocab"].pop("the")
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(SettingsError, match=r"^speculation\.model: .* has other tokens than"):
        resolve(parse(args))


def test_ignored_keys_of_config_json_reach_the_stages() -> None:
    args = {"model": {"path": DEMO, "ignore_config_keys": ["alpha", "rope_scaling.beta"]}}
    assert resolve(parse(args)).stage.ignored_config_keys == ("alpha", "rope_scaling.beta")
