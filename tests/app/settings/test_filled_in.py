"""`args` with their defaults mean what they meant without, and can be written down again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from app.settings.filled_in import filled_in, with_objective
from app.settings.model_folder import SettingsError
from app.settings.models import parse_each, resolve_each

ROOT = Path(__file__).resolve().parents[3]
DEMO = {"path": str(ROOT / "configs/models/demo")}
CONFIGS = sorted((ROOT / "configs/serve").glob("*.yaml"))


def same(args: dict[str, Any]) -> dict[str, Any]:
    """`args` filled in, once it is seen that they mean the same and hold nothing left to fill."""
    found = filled_in(args)
    assert resolve_each(found) == resolve_each(args)
    assert [one.model_dump() for one in parse_each(found)] == [
        one.model_dump() for one in parse_each(args)
    ]
    written: dict[str, Any] = yaml.safe_load(yaml.safe_dump(found))
    assert filled_in(written) == written == found
    return found


@pytest.mark.parametrize("config", CONFIGS, ids=lambda p: p.stem)
def test_shipped_configs_mean_the_same(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for application in yaml.safe_load(config.read_text())["applications"]:
        same(application["args"])


@pytest.mark.parametrize(
    "args",
    [
        {"speculation": {"drafter": "auto"}},  # unlike none given, it may be inexact
        {"scheduling": {"budget": "fixed"}},  # where slo.delivery_ms would have no effect
        {"scheduling": {"max_requests": 9000}},  # more than the default of max_step_tokens
        {"slo": "strict", "batches": None, "fleet": {"routing_options": {}}},
        {"api": {"api_keys": {"env:KEY": {"admin": True}}, "allowed_origins": ["http://a"]}},
        {"adapters": {"max_adapters": 2, "paths": {"a": "b"}}},
    ],
)
def test_what_adapts_unless_it_is_given_goes_on_adapting(args: dict[str, Any]) -> None:
    same({"model": DEMO, **args})


def test_the_names_are_those_of_the_settings_file() -> None:
    found = same({"model": DEMO, "slo": {"tbt_ms": 50}})
    assert (found["slo"]["tbt_ms"], found["slo"]["ttft_ms"]) == (50, None)
    assert found["kv"]["block_size"] == 16
    assert "delivery_ms" not in found["slo"]
    assert "drafter" not in found["speculation"]
    assert found["api"]["public_paths"] == ["/", "/health", "/live"]


def test_every_model_has_its_own() -> None:
    models = [{"model": {**DEMO, "name": n}, "slo": {"tbt_ms": t}} for n, t in (("a", 9), ("b", 8))]
    found = same({"models": models, "kv": {"swap_gib": 1.0}, "listen": "127.0.0.1:80"})
    assert [entry["slo"]["tbt_ms"] for entry in found["models"]] == [9, 8]
    assert [entry["kv"]["swap_gib"] for entry in found["models"]] == [1.0, 1.0]
    assert found["listen"] == "127.0.0.1:80"
    assert "kv" not in found


def test_each_model_that_names_no_objective_has_the_default() -> None:
    def found(**args: Any) -> list[float | None]:
        return [dict(settings.slo)["tbt_ms"] for settings in parse_each(with_objective(args, 100))]

    slos: list[Any] = [{"ttft_ms": 9}, {"tbt_ms": 50}, {"tbt_ms": None}, "relaxed"]
    names: list[dict[str, Any]] = [{"model": {**DEMO, "name": f"m{n}"}} for n in range(5)]
    models = [names[0], *({**name, "slo": slo} for name, slo in zip(names[1:], slos, strict=True))]
    assert found(models=models) == [100, 100, 50, None, None]
    assert found(models=models[:4], slo={"tbt_ms": 7}) == [7, 7, 50, None]
    assert found(models=models, slo="relaxed")[0] is None
    assert found(models=models[:2], slo={"ttft_ms": 3}) == [100, 100]
    with pytest.raises(SettingsError, match="a mapping with a section `model`"):
        found(models=[3])
