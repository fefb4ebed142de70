"""What messages call a setting."""

from __future__ import annotations

import pytest

from app.settings.load import parse
from app.settings.messages import dotted, in_section, suggestion
from app.settings.model_folder import SettingsError


def test_a_key_of_clients_is_called_by_its_digest() -> None:
    assert dotted(("api", "api_keys", "secret", "admim")) == "api.api_keys.key-2bb80d53.admim"
    assert dotted(("api", "api_keys", "env:NAME")) == "api.api_keys.env:NAME"
    assert dotted(("api", "api_keys", "env:NAME", "[key]")) == "api.api_keys.env:NAME"


def test_an_unknown_key_may_be_another() -> None:
    assert suggestion(("kv", "memory_gb")) == "; did you mean 'memory_gib'?"
    assert suggestion(("kv", "x")) == ""


def test_a_setting_of_the_scheduler_is_called_by_its_section() -> None:
    assert in_section("tbt_ms: must be above 0") == "slo.tbt_ms: must be above 0"
    assert in_section("policy: unknown") == "scheduling.policy: unknown"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"model": "org/name"}, "model: must be a mapping, such as {path: org/name}"),
        ({"slo": 100}, "slo: must be a mapping, such as {tbt_ms: 100}"),
        ({"kv": 4}, "kv: must be a mapping; {} is an empty one"),
        (
            {"api": {"api_keys": ["secret"]}},
            "api.api_keys: must be a mapping, such as {env:NAME: {}}",
        ),
        (
            {"api": {"api_keys": {"secret": None}}},
            "api.api_keys.key-2bb80d53: must be a mapping; {} is an empty one",
        ),
        ({"listen": 8000}, "listen: must be host:port, such as 127.0.0.1:8000, not 8000"),
        ({"listen": "8000"}, "listen: must be host:port, such as 127.0.0.1:8000, not '8000'"),
    ],
)
def test_a_value_of_another_kind_is_answered_with_an_example(
    args: dict[str, object], said: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        parse({"model": {"path": "configs/models/demo"}, **args})
    assert str(caught.value) == said
