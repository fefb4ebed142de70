"""A deployment's `args` in YAML, checked and resolved into frozen engine settings.

Configuration flows one way: YAML -> `Settings` (validated, unknown keys refused) ->
`EngineConfig` (plain data, saved beside every result) -> actors.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from actors.engine.config import GIB, EngineConfig, KVMemory
from actors.scheduling.build import check_config
from actors.scheduling.config import SETTINGS, ConfigError, SchedulerConfig
from actors.stage.models.config import DecoderConfig
from actors.stage.spec import BATCH_INVARIANT, StageSpec
from app.paths import locate
from app.settings.effects import with_room_for_drafts, without_effect, without_reuse
from app.settings.fleet import FleetSettings
from app.settings.messages import in_section, message_of
from app.settings.model_folder import (
    SettingsError,
    hub_name,
    model_description,
    model_folder,
    read_cost_model,
    vocabulary,
)
from app.settings.schema import (
    KVSettings,
    ModelSettings,
    ParallelSettings,
    Settings,
)

logger = logging.getLogger("legato.settings")

# Default share of free memory for the KV cache. A GPU serves only the engine, and its other needs
# are measured first; a machine's memory is also for other programs.
KV_FRACTIONS = {"cuda": 0.9, "cpu": 0.25}
_CONSTANT_BUDGETS = ("fixed", "throttled")


def parse(args: Mapping[str, Any]) -> Settings:
    """Validate `args`; raises SettingsError with one line per problem, keys dotted."""
    try:
        return Settings.model_validate(args)
    except ValidationError as error:
        lines = [message_of(problem) for problem in error.errors()]
        raise SettingsError("; ".join(lines)) from error


def resolve(settings: Settings) -> EngineConfig:
    """Frozen engine settings from validated ones and the model's description.

    Raises SettingsError naming an invalid setting.
    """
    for key, why in without_effect(settings):
        raise SettingsError(f"{key}: {why}")
    if settings.parallel.device == "auto":  # not yet decided (`app.main.build_app`)
        parallel = settings.parallel.model_copy(update={"device": "cpu"})
        settings = settings.model_copy(update={"parallel": parallel})
    parallel, kv, adapters = settings.parallel, settings.kv, settings.adapters
    _check_way(settings.fleet, kv)
    config = model_description(settings.model.path)
    scheduler = _scheduler(settings, config)
    if scheduler.draft_model is not None:
        _check_draft_model(settings, config)
    stage = _stage(settings, scheduler, config)
    gpus = parallel.gpus_per_rank
    gpus = float(parallel.device == "cuda") if gpus is None else gpus
    accelerator = _accelerator(parallel, gpus)
    is_triton = parallel.device == "cuda" and parallel.backend in ("auto", "triton")
    if not parallel.one_launch_attention and not is_triton:
        needed = "parallel.device: cuda and parallel.backend: triton or auto"
        raise SettingsError(f"parallel.one_launch_attention: has no effect without {needed}")
    activation_bytes = 4 * config.hidden_size * scheduler.max_step_tokens
    return EngineConfig(
        stage=stage,
        scheduler=scheduler,
        kv=_kv_memory(kv, kv.memory_fraction or KV_FRACTIONS[parallel.device], settings.fleet),
        transport=parallel.transport,
        accelerator=accelerator,
        channel_bytes=(1 << 20) + (activation_bytes if stage.num_stages > 1 else 0),
        cpus_per_rank=parallel.cpus_per_rank,
        gpus_per_rank=gpus,
        calibrate=settings.engine.calibrate and _wants_cost_model(settings, scheduler),
        whole_context=settings.model.max_model_len is not None,
        drafts_if_exact=not _names_drafter(settings),
        step_deadline_s=settings.engine.step_deadline_s,
        request_deadline_s=settings.engine.request_deadline_s,
        load_timeout_s=settings.engine.load_timeout_s,
        event_log=settings.telemetry.directory if settings.telemetry.events else None,
        event_log_bytes=int(settings.telemetry.events_gib * GIB),
        standby=_standby(settings.engine.standby, parallel.device),
        max_rebuilds=settings.engine.max_rebuilds,
        adapters=tuple(
            (slot, str(locate(path).resolve()))
            for slot, path in enumerate([] if adapters is None else adapters.paths.values())
        ),
    )


def _max_model_len(model: ModelSettings, config: DecoderConfig) -> int:
    limit = config.max_model_len
    if model.max_model_len is not None and model.max_model_len > limit:
        raise SettingsError(
            f"model.max_model_len: {model.max_model_len} exceeds the model's {limit} positions"
        )
    return model.max_model_len or min(limit, 1 << 20)  # whose positions take 512 MiB


def _stage(settings: Settings, scheduler: SchedulerConfig, config: DecoderConfig) -> StageSpec:
    model, parallel, adapters = settings.model, settings.parallel, settings.adapters
    num_stages, num_layers = parallel.pipeline_stages, config.num_layers
    if num_stages > num_layers:
        raise SettingsError(
            f"parallel.pipeline_stages: {num_stages} stages for {num_layers} layers"
        )
    return StageSpec(
        model_path=str(model_folder(model.path)),
        hub_model=hub_name(model.path),
        num_stages=num_stages,
        tensor_ranks=parallel.tensor_ranks,
        ignored_config_keys=model.ignore_config_keys,
        load_format=model.load_format,
        dtype=model.dtype,
        kv_dtype=settings.kv.dtype,
        quantization=model.quantization,
        backend=parallel.backend,
        device=parallel.device,
        block_size=scheduler.block_size,
        max_requests=scheduler.max_requests,
        max_model_len=scheduler.max_model_len,
        max_step_tokens=scheduler.max_step_tokens,
        num_threads=parallel.threads_per_rank,
        seed=model.seed,
        cuda_graphs=parallel.cuda_graphs,
        graph_tokens=parallel.graph_tokens,
        symmetric_memory=parallel.symmetric_memory,
        one_launch_attention=parallel.one_launch_attention,
        max_adapters=0 if adapters is None else adapters.max_adapters,
        max_adapter_rank=0 if adapters is None else adapters.max_rank,
        draft_model_path=scheduler.draft_model,
        hub_draft_model=hub_name(settings.speculation.model_dump()["model"]),
        max_drafts=0 if scheduler.draft_model is None else scheduler.most_drafts,
    )


def _check_draft_model(settings: Settings, config: DecoderConfig) -> None:
    """Raises SettingsError for one that cannot draft for the model of this config."""
    key, path = "speculation.model", settings.speculation.model_dump()["model"]
    if settings.parallel.device != "cpu":
        raise SettingsError(f"{key}: needs parallel.device: cpu")
    found = model_description(path, key)
    size, needed = found.vocab_size, config.vocab_size
    if size != needed:
        raise SettingsError(f"{key}: {path!r} has {size} tokens, the model {needed}")
    own, served = vocabulary(path), vocabulary(settings.model.path)
    if own != served and own and served:
        raise SettingsError(f"{key}: {path!r} has other tokens than the model (tokenizer.json)")


def _kv_memory(kv: KVSettings, fraction: float, fleet: FleetSettings | None) -> KVMemory:
    paths = (kv.disk_cache_path, kv.shared_cache_path)
    disk, shared = (path and str(Path(path).expanduser().absolute()) for path in paths)
    between_nodes = False if fleet is None else fleet.listens_for_nodes
    return KVMemory(
        kv.memory_gib, fraction, kv.swap_gib, kv.host_cache_gib, kv.disk_cache_gib, disk,
        kv.shared_cache_gib, shared, between_nodes, kv.direct_gib,
    )  # fmt: skip


def _check_predictions(settings: Settings, scheduler: SchedulerConfig) -> None:
    """Raises SettingsError for a part that predicts without a cost model."""
    if settings.engine.calibrate or scheduler.cost_model:
        return
    if scheduler.tbt_rule:
        raise SettingsError("slo.tbt_rule: needs `engine.calibrate` or `scheduling.cost_model`")
    for key, part in (("budget", scheduler.budget), ("admission", scheduler.admission)):
        if part in ("adaptive", "profiled", "predictive"):
            raise SettingsError(
                f"scheduling.{key}: {part} needs `engine.calibrate` or `scheduling.cost_model`"
            )


def _check_way(fleet: FleetSettings | None, kv: KVSettings) -> None:
    """Raises SettingsError for a way without what it needs, and for a share that nobody reads."""
    if fleet is None:
        if kv.shared_cache_gib:
            raise SettingsError("kv.shared_cache_gib: has no effect without `fleet`")
    elif len(fleet.roles) > 1:
        if not kv.shared_cache_gib:
            raise SettingsError(
                f"fleet.way: {fleet.way} needs `kv.shared_cache_gib`, or every prompt is computed "
                "twice"
            )
        if fleet.sleeps:
            raise SettingsError(f"fleet.sleeps: not with `fleet.way: {fleet.way}`")


def _standby(wanted: bool | None, device: str) -> bool:
    """Raises SettingsError where it is wanted but not available."""
    if wanted and device != "cpu":
        raise SettingsError("engine.standby: needs parallel.device: cpu (a GPU has one process)")
    return device == "cpu" if wanted is None else wanted


def _wants_cost_model(settings: Settings, scheduler: SchedulerConfig) -> bool:
    """Whether a chosen part needs a cost model; the default drafter uses one that is there."""
    adapts = scheduler.budget == "auto" and scheduler.token_budget is None
    predicts = adapts or scheduler.budget in ("adaptive", "profiled")
    drafts = _names_drafter(settings) and scheduler.drafter in ("auto", "model")
    asks = scheduler.tbt_rule is not None or drafts
    return predicts or asks or scheduler.admission == "predictive"


def _names_drafter(settings: Settings) -> bool:
    return bool({"drafter", "model"} & settings.speculation.model_fields_set)


def _is_exact(parallel: ParallelSettings) -> bool:
    """Whether drafts can change no text, unless `auto` finds no such backend."""
    return parallel.device == "cpu" and parallel.backend in ("auto", *BATCH_INVARIANT)


def _accelerator(parallel: ParallelSettings, gpus_per_rank: float) -> str | None:
    """The device type of direct transfers of activations; None for host memory."""
    conditions = {
        "parallel.device: cuda": parallel.device == "cuda",
        "parallel.transport: graph": parallel.transport == "graph",
        "a whole GPU per rank (parallel.gpus_per_rank: 1)": gpus_per_rank >= 1,
    }
    missing = [wish for wish, met in conditions.items() if not met]
    if parallel.activations == "accelerator" and missing:
        raise SettingsError(f"parallel.activations: accelerator needs {' and '.join(missing)}")
    return None if missing or parallel.activations == "memory" else parallel.device


def _scheduler(settings: Settings, config: DecoderConfig) -> SchedulerConfig:
    values: dict[str, Any] = {
        name: setting.from_yaml(getattr(getattr(settings, setting.section), setting.key(name)))
        for name, setting in SETTINGS.items()
        if not setting.hidden
    }
    if not _names_drafter(settings) and not _is_exact(settings.parallel):
        logger.info("speculation.drafter: none, as only the cpu backend is batch-invariant")
        values["drafter"] = "none"
    if config.mixer is not None:
        values |= without_reuse(settings, config.architecture)
        logger.info("no swapping: layers of the model keep a state")
    if values["draft_model"] is not None:
        values["draft_model"] = str(model_folder(values["draft_model"], "speculation.model"))
    if "delivery_ms" in settings.slo.model_fields_set and values["budget"] in _CONSTANT_BUDGETS:
        raise SettingsError(f"slo.delivery_ms: has no effect with the budget {values['budget']!r}")
    if values["cost_model"] is not None:
        values["cost_model"] = read_cost_model(values["cost_model"])
    # Whole-prompt policies put a full prompt into one step, in addition to the decodes.
    least = (values["token_budget"] or 0) + values["max_requests"]
    if (
        values["max_step_tokens"] < least
        and "max_step_tokens" in settings.scheduling.model_fields_set
    ):
        raise SettingsError(
            f"scheduling.max_step_tokens: less than the {least} of token_budget and max_requests"
        )
    values["max_step_tokens"] = max(values["max_step_tokens"], least)
    if config.mixer is not None:
        values |= with_room_for_drafts(settings, values, config.architecture)
    scheduler = SchedulerConfig(
        num_blocks=1,  # filled in once the stages have reported their memory
        num_stages=settings.parallel.pipeline_stages,
        max_model_len=_max_model_len(settings.model, config),
        **values,
    )
    _check_predictions(settings, scheduler)
    try:
        check_config(scheduler, is_measured=settings.engine.calibrate)
    except ConfigError as error:
        raise SettingsError(in_section(str(error))) from error
    return scheduler
