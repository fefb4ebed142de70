"""`user_config` as Serve hands it over: at the start of a replica, and beside its streams."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import pytest

from actors.scheduling.config import SchedulerConfig
from app.engine_client.client import EngineClient, EngineUnavailable, RequestRefused
from app.user_config import UserConfig

CONFIGURED = SchedulerConfig(
    num_blocks=10, max_model_len=100, tbt_s=0.1, policy="vllm", order="fair",
    order_options={"ageing_s": 5.0},
)  # fmt: skip


class Engine:
    """Takes what the scheduling core would."""

    def __init__(self) -> None:
        self.settings = CONFIGURED
        self.num_unavailable = 0  # so often it is being rebuilt for longer than a request waits

    def is_ready(self) -> bool:
        return not self.num_unavailable

    async def reconfigure(self, changes: Mapping[str, Any]) -> None:
        await asyncio.sleep(0)
        if self.num_unavailable:
            self.num_unavailable -= 1
            raise EngineUnavailable("the engine is being rebuilt")
        try:
            self.settings = self.settings.with_changes(changes)
        except ValueError as error:
            raise RequestRefused(str(error)) from error


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def user_config(engine: Engine) -> UserConfig:
    return UserConfig(cast(EngineClient, engine), CONFIGURED)


async def test_a_key_that_is_no_longer_given_returns_to_what_was_configured(
    engine: Engine, user_config: UserConfig
) -> None:
    await user_config.apply({"policy": "sarathi", "slo.tbt_ms": 50, "order": "priority"})
    assert (engine.settings.policy, engine.settings.tbt_s) == ("sarathi", 0.05)
    await user_config.apply({"tbt_ms": 70})
    assert engine.settings == replace(CONFIGURED, tbt_s=0.07, request_slots=128)
    await user_config.apply(None)
    assert engine.settings == replace(CONFIGURED, request_slots=128)


async def test_the_same_again_leaves_what_was_changed_live(
    engine: Engine, user_config: UserConfig
) -> None:
    """Serve calls again when the ranks of replicas change."""
    await user_config.apply({"tbt_ms": 50})
    await engine.reconfigure({"tbt_ms": 90})
    await user_config.apply({"slo.tbt_ms": 50})
    assert engine.settings.tbt_s == 0.09


async def test_a_replica_does_not_start_with_a_wrong_key(user_config: UserConfig) -> None:
    with pytest.raises(RequestRefused, match="polcy"):
        await user_config.apply({"polcy": "vllm"})


async def test_a_replica_that_serves_keeps_its_settings_and_its_streams(
    engine: Engine, user_config: UserConfig, caplog: pytest.LogCaptureFixture
) -> None:
    await user_config.apply(None)  # as it starts
    await user_config.apply({"tbt_ms": 60, "polcy": "vllm"})
    assert engine.settings.tbt_s == CONFIGURED.tbt_s
    assert "user_config is not applied" in caplog.text
    assert "polcy" in caplog.text


async def settled(user_config: UserConfig) -> None:
    await asyncio.gather(*user_config._tasks)


async def test_settings_wait_for_a_rebuild_that_takes_long(
    engine: Engine, user_config: UserConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """Serve does not: until it is told, it takes the deployment to be changing."""
    await user_config.apply(None)  # as it starts
    engine.num_unavailable = 50
    for given in ({"tbt_ms": 60, "policy": "orca"}, {"tbt_ms": 70}):
        await user_config.apply(given)
        assert engine.settings == CONFIGURED
    await settled(user_config)
    assert engine.settings == replace(CONFIGURED, tbt_s=0.07, request_slots=128)
    assert not caplog.messages


async def test_settings_that_found_no_engine_are_applied_when_they_are_given_again(
    engine: Engine, user_config: UserConfig, caplog: pytest.LogCaptureFixture
) -> None:
    await user_config.apply(None)  # as it starts
    engine.num_unavailable = 1000
    await user_config.apply({"tbt_ms": 60})
    await settled(user_config)
    assert "user_config is not applied" in caplog.text
    assert engine.settings.tbt_s == CONFIGURED.tbt_s
    engine.num_unavailable = 0
    await user_config.apply({"tbt_ms": 60})
    assert engine.settings.tbt_s == 0.06


async def test_settings_that_were_refused_are_told_of_once(
    user_config: UserConfig, caplog: pytest.LogCaptureFixture
) -> None:
    await user_config.apply(None)  # as it starts
    for _ in range(2):
        await user_config.apply({"polcy": "vllm"})
    assert len(caplog.messages) == 1
