"""Overrides of deployments are checked before anything is deployed: Ray would drop one of an
unknown name, and replace a running replica that refuses its `user_config`."""

from __future__ import annotations

from typing import Any

import pytest

from app.cli.serve_config import check_models
from app.cli.serve_keys import OURS
from app.settings.model_folder import SettingsError

DEMO = {"model": {"path": "configs/models/demo"}}
FLEET = {**DEMO, "fleet": {}}
SPLIT = {**DEMO, "fleet": {"way": "split"}, "kv": {"shared_cache_gib": 0.01}}


def config(args: dict[str, Any], *deployments: dict[str, Any]) -> dict[str, Any]:
    application = {"import_path": OURS, "args": args, "deployments": list(deployments)}
    return {"applications": [application]}


@pytest.mark.parametrize(
    ("args", "override"),
    [
        (DEMO, {"name": "LLMServer", "user_config": {"policy": "vllm", "slo.tbt_ms": 200}}),
        (DEMO, {"name": "LLMServer", "num_replicas": 2, "user_config": None}),
        (FLEET, {"name": "Front", "num_replicas": 2}),
        (FLEET, {"name": "Engine", "user_config": {"tbt_ms": 80}}),
        (SPLIT, {"name": "Engine-decode", "user_config": {"tbt_ms": 80}}),
    ],
)
def test_what_there_is_may_be_overridden(args: dict[str, Any], override: dict[str, Any]) -> None:
    check_models(config(args, override))


@pytest.mark.parametrize(
    ("args", "override", "said"),
    [
        (DEMO, {"name": "LLMServr"}, "LLMServr: no such deployment; did you mean 'LLMServer'"),
        (DEMO, {"name": "x"}, "x: no such deployment; those here are LLMServer"),
        (SPLIT, {"name": "Engine"}, "Engine: no such deployment; did you mean 'Engine-"),
        (FLEET, {"name": "Front", "user_config": {"tbt_ms": 80}}, "user_config: belongs to Engine"),
        (
            DEMO,
            {"name": "LLMServer", "user_config": {"polcy": "vllm"}},
            "user_config.polcy: ",
        ),
        (DEMO, {"name": "LLMServer", "user_config": {"policy": "best"}}, "user_config.policy: "),
        (DEMO, {"name": "LLMServer", "user_config": {"block_size": 8}}, "user_config.block_size: "),
        (DEMO, {"name": "LLMServer", "user_config": [1]}, "user_config: must be a mapping"),
    ],
)
def test_what_there_is_not_is_named(
    args: dict[str, Any], override: dict[str, Any], said: str
) -> None:
    with pytest.raises(SettingsError, match=f"deployments.{override['name']}.*{said}|{said}"):
        check_models(config(args, override))


def test_deployments_of_an_application_around_legato_s_are_its_own() -> None:
    whole = config(DEMO, {"name": "Mine"})
    whole["applications"][0]["import_path"] = "mine:build"
    check_models(whole)
