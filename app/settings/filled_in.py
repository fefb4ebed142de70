"""A deployment's `args` with defaults written out: every one, or the objective alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from app.settings.models import OWN, parse_each
from app.settings.schema import Settings

# Left out unless given: given, even as their defaults, they demand what otherwise adapts.
LEFT_OUT: Final = (
    ("scheduling", "max_step_tokens"),
    ("slo", "delivery_ms"),
    ("speculation", "drafter"),
    ("speculation", "model"),
)


def filled_in(args: Mapping[str, Any]) -> dict[str, Any]:
    """`args` that mean the same and hold every setting, in the order of the schema, except those
    of `LEFT_OUT`; of each entry of `models` all that may be its own. Raises SettingsError."""
    each = [_written(settings) for settings in parse_each(args)]
    if "models" not in args:
        return each[0]
    shared = {key: value for key, value in each[0].items() if key not in OWN}
    entries = [{key: value for key, value in one.items() if key in OWN} for one in each]
    return {"models": entries, **shared}


def with_objective(args: Mapping[str, Any], tbt_ms: float) -> dict[str, Any]:
    """`args` with this TBT objective for every model whose `slo` says nothing of one; null
    says that there is none."""
    slo = args.get("slo", {})
    if not isinstance(slo, Mapping) or "tbt_ms" in slo or "tbt_rule" in slo:
        return dict(args)
    if not isinstance(models := args.get("models"), list):
        return {**args, "slo": {"tbt_ms": tbt_ms, **slo}}
    entries = [with_objective(e, tbt_ms) if isinstance(e, Mapping) else e for e in models]
    return {**args, "models": entries}


def _written(settings: Settings) -> dict[str, Any]:
    values: dict[str, Any] = _plain(settings.model_dump())
    for section, key in LEFT_OUT:
        if key not in getattr(settings, section).model_fields_set:
            del values[section][key]
    return values


def _plain(value: Any) -> Any:
    """The value in the types of YAML and JSON; sets become sorted lists."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, tuple | list):
        return [_plain(inner) for inner in value]
    return value
