"""Settings that another one leaves without effect: refused, as nobody should believe in them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from actors.scheduling.config import DEFAULT_MAX_DRAFTS
from app.settings.model_folder import SettingsError
from app.settings.schema import Settings, fields_of

logger = logging.getLogger("legato.settings")

# A setting that is not at its default, and what it has no effect without, or with a value of.
_WITHOUT = (
    ("kv.disk_cache_path", "kv.disk_cache_gib"),
    ("kv.shared_cache_path", "kv.shared_cache_gib"),
    ("kv.direct_gib", "kv.shared_cache_gib"),
    ("telemetry.events", "telemetry.directory"),
    ("telemetry.events_gib", "telemetry.events"),
)
_WITH = (
    ("kv.host_cache_gib", "kv.prefix_cache", False),
    ("kv.disk_cache_gib", "kv.prefix_cache", False),
    ("kv.shared_cache_gib", "kv.prefix_cache", False),
    ("kv.swap_gib", "scheduling.swap", "never"),
    ("model.seed", "model.load_format", "auto"),
    ("parallel.gpus_per_rank", "parallel.device", "cpu"),
)


def without_effect(settings: Settings) -> Iterator[tuple[str, str]]:
    """Each setting that is written and does nothing, by its key, and why."""

    def value(key: str, default: bool = False) -> Any:
        section = getattr(settings, key.partition(".")[0])
        name = key.partition(".")[2]
        return fields_of(type(section))[name].default if default else getattr(section, name)

    for key, other in _WITHOUT:
        if value(key) != value(key, default=True) and not value(other):
            yield key, f"has no effect without `{other}`"
    for key, other, off in _WITH:
        if value(key) not in (0, value(key, default=True)) and value(other) == off:
            yield key, f"has no effect with `{other}: {str(off).lower()}`"
    if settings.kv.memory_fraction is not None and settings.kv.memory_gib is not None:
        yield "kv.memory_fraction", "has no effect with `kv.memory_gib`"
    parallel = settings.parallel
    if parallel.symmetric_memory and (parallel.device != "cuda" or parallel.tensor_ranks == 1):
        needed = "parallel.device: cuda and parallel.tensor_ranks above 1"
        yield "parallel.symmetric_memory", f"needs {needed}"


# Settings of what KV alone cannot do where layers keep a state, and their values that do not ask
# for it.
_REUSE: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("kv.swap_gib", (0,)),
    ("kv.host_cache_gib", (0,)),
    ("kv.disk_cache_gib", (0,)),
    ("kv.shared_cache_gib", (0,)),
    ("scheduling.swap", ("never", "auto")),
)


def without_reuse(settings: Settings, architecture: str) -> dict[str, Any]:
    """Values of the scheduler's settings for a model with layers that keep a state: KV alone
    continues no request. Raises SettingsError for a setting that is written and asks for more."""
    for key, harmless in _REUSE:
        section, name = key.split(".")
        within = getattr(settings, section)
        if name in within.model_fields_set and getattr(within, name) not in harmless:
            raise SettingsError(
                f"{key}: has no effect with {architecture}, whose layers keep a state that KV "
                "blocks do not hold"
            )
    return {"swap": "never", "num_saved_states": 0}


def with_room_for_drafts(
    settings: Settings, values: Mapping[str, Any], architecture: str
) -> dict[str, Any]:
    """Changes of the scheduler's settings for a model with layers that keep a state: steps hold
    drafts only beside all that would be computed again, were every draft wrong. Raises
    SettingsError where drafts are asked for and steps, of a size that is written, leave none."""
    most, num_requests = values["max_step_tokens"], values["max_requests"]
    if values["drafter"] == "none" or most > num_requests:
        return {}
    if "max_step_tokens" not in settings.scheduling.model_fields_set:
        return {"max_step_tokens": num_requests + (values["max_drafts"] or DEFAULT_MAX_DRAFTS)}
    problem = (
        f"scheduling.max_step_tokens: {most} leaves no room for drafts beside {num_requests} "
        f"requests (max_requests) of {architecture}, whose layers keep a state"
    )
    if settings.speculation.model_fields_set:
        raise SettingsError(f"{problem}; `speculation.drafter: none` accepts it")
    logger.warning("%s: speculation.drafter is none", problem)
    return {"drafter": "none"}
