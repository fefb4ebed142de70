"""What messages call a setting."""

from __future__ import annotations

from app.settings.messages import dotted, in_section, suggestion


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
