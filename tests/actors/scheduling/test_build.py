"""Objectives by the paper's rule: 5 and 25 times a decode step of 32 streams at 4096 tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from actors.scheduling.budgets.fixed import FixedBudget
from actors.scheduling.build import build_core, check_config
from actors.scheduling.config import ConfigError, SchedulerConfig

# 10 ms a step, 0.1 ms a token, 1 us a token of context.
COSTS = {
    "name": "toy", "tokens_s": [[1, 0.0101], [1000, 0.110]], "decode_kv_s": 1e-6,
}  # fmt: skip
CONFIG = SchedulerConfig(num_blocks=100_000, max_requests=64, cost_model=COSTS)
STEP_S = 0.010 + 32 * 1e-4 + 32 * 4096 * 1e-6


@pytest.mark.parametrize(("rule", "steps"), [("strict", 5), ("relaxed", 25)])
def test_a_rule_becomes_an_objective(rule: str, steps: int) -> None:
    config = build_core(replace(CONFIG, tbt_rule=rule)).config
    assert config.tbt_s == pytest.approx(steps * STEP_S)
    assert config.tbt_rule is None
    assert config.with_changes({"slo.tbt_ms": 50}).tbt_s == 0.05, "it can be changed live"


def test_a_small_engine_is_judged_by_what_it_can_hold() -> None:
    small = replace(CONFIG, tbt_rule="strict", max_requests=8, max_model_len=1000)
    assert build_core(small).config.tbt_s == pytest.approx(5 * (0.0108 + 8 * 1000 * 1e-6))
    little = replace(small, num_blocks=50)  # 800 tokens of KV: 100 of each stream
    assert build_core(little).config.tbt_s == pytest.approx(5 * (0.0108 + 8 * 100 * 1e-6))


def test_a_rule_beside_an_objective_or_without_a_cost_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="tbt_rule: has no effect with"):
        check_config(replace(CONFIG, tbt_rule="strict", tbt_s=0.1))
    with pytest.raises(ConfigError, match="tbt_rule: needs a cost model"):
        build_core(replace(CONFIG, tbt_rule="strict", cost_model=None))
    with pytest.raises(ConfigError, match="tbt_rule: unknown 'lax'"):
        check_config(replace(CONFIG, tbt_rule="lax"))


@pytest.mark.parametrize(
    ("part", "name", "options", "said"),
    [
        ("budget", "fixed", {"tokens": 0}, "tokens must lie between 1 and 8192, not 0"),
        ("budget", "fixed", {"tokens": 8193}, "tokens must lie between 1 and 8192, not 8193"),
        (
            "budget",
            "auto",
            {"tokens": 512, "ease": 0.9},
            "ease has no effect where the tokens are given",
        ),
        ("budget", "auto", {"efficiency": 1.5}, "efficiency must lie between 0 and 1, not 1.5"),
        ("budget", "adaptive", {"smoothness": 0.0}, "smoothness must lie between"),
        ("budget", "adaptive", {"growth": -1}, "growth must lie between"),
        ("budget", "adaptive", {"pace": 0.2}, "pace must lie between"),
        ("budget", "profiled", {"quantile": 2.0}, "quantile must lie between 0 and 1"),
        ("budget", "profiled", {"num_decodes": 0}, "num_decodes must lie between 1 and 64"),
        ("budget", "throttled", {"iterations": 0}, "iterations must lie between"),
        ("budget", "throttled", {"threshold": 1.0}, "threshold must lie in"),
        ("admission", "predicted_peak", {"reserve": 1.5}, "reserve must lie between"),
        ("admission", "predictive", {"confidence": 1.0}, "confidence lies between 0 and 1"),
        ("admission", "predictive", {"action": "wait"}, "action is 'refuse' or 'queue'"),
        ("admission", "predictive", {"margin": -0.1}, "margin must lie between"),
        ("admission", "predictive", {"expected_share": 2.0}, "expected_share must lie between"),
    ],
)
@pytest.mark.parametrize("costs", [None, COSTS], ids=["to be measured", "given"])
def test_options_out_of_range_are_found_before_anything_starts(
    part: str, name: str, options: dict[str, Any], said: str, costs: dict[str, Any] | None
) -> None:
    changes: dict[str, Any] = {part: name, f"{part}_options": options}
    if name == "throttled":
        changes["tbt_rule"] = "strict"  # an objective that is only known with the cost model
    else:
        changes["tbt_s"] = 0.1
    with pytest.raises(ConfigError, match=f"^{part}_options: .*{said}"):
        check_config(replace(CONFIG, cost_model=costs, num_blocks=1, **changes))


def test_tokens_that_are_given_make_the_budget_fixed() -> None:
    core = build_core(replace(CONFIG, tbt_s=0.1, budget_options={"tokens": 100}))
    assert isinstance(core.builder.budget, FixedBudget)
    assert core.builder.budget.tokens == 100


def test_options_are_those_that_a_part_takes_from_nowhere_else() -> None:
    """Not what it takes from other settings, and also those that a function passes on."""
    taken = [("budget", "profiled", "quantile"), ("budget", "auto", "tokens")]
    taken += [("admission", "predictive", "reserve"), ("admission", "predictive", "margin")]
    for setting, name, option in taken:
        changes: dict[str, Any] = {setting: name, f"{setting}_options": {option: 1}}
        check_config(replace(CONFIG, tbt_s=0.1, **changes))
        for other in ("tbt_s", "max_requests", "_predicted", "nonsense"):
            changes[f"{setting}_options"] = {other: 1}
            with pytest.raises(ConfigError, match=f"^{setting}_options: unknown .*; {name} has "):
                check_config(replace(CONFIG, tbt_s=0.1, **changes))
