"""The schema of a deployment's `args` in YAML, and its resolution into frozen engine settings.

Configuration flows one way: YAML -> `Settings` (validated, unknown keys refused) ->
`EngineConfig` (plain data, saved beside every result) -> actors.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from actors.engine_config import EngineConfig, KVMemory
from actors.scheduling.build import check_config
from actors.scheduling.config import ConfigError, SchedulerConfig
from actors.stage.spec import StageSpec
from app.api.options import ApiOptions


class SettingsError(ValueError):
    """The settings are wrong; the message names the key and, where it can, the cure."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSettings(_Section):
    path: str = Field(description="Hugging Face folder: config.json, *.safetensors, tokenizer.")
    name: str | None = Field(None, description="Name clients use; the folder's name if absent.")
    load_format: Literal["auto", "dummy"] = Field(
        "auto", description="dummy: random weights from config.json alone, for measurements."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["none", "int8", "int4", "fp8"] = Field(
        "none", description="Weights quantised at load. GPTQ and AWQ folders need nothing here."
    )
    max_model_len: int | None = Field(
        None, gt=0, description="Longest prompt plus output, in tokens; the model's own if absent."
    )
    seed: int = Field(0, ge=0, description="Of dummy weights.")


class ParallelSettings(_Section):
    pipeline_stages: int = Field(1, ge=1)
    tensor_ranks: int = Field(1, ge=1, description="Ranks of each stage (tensor parallelism).")
    transport: Literal["graph", "call"] = Field(
        "graph", description="Ray compiled graph, or plain actor calls."
    )
    activations: Literal["auto", "memory", "accelerator"] = Field(
        "auto",
        description="Between stages: shared memory, or GPU to GPU through the graph; auto takes "
        "the latter where every rank has a GPU of its own.",
    )
    device: Literal["cpu", "cuda"] = "cpu"
    backend: Literal["auto", "cpu", "torch", "triton", "flash_attn"] = "auto"
    threads_per_rank: int = Field(0, ge=0, description="0: cores shared by the ranks.")
    cpus_per_rank: float = Field(0.5, ge=0, description="Ray resources reserved per rank.")
    gpus_per_rank: float | None = Field(None, ge=0, description="1 on cuda if absent.")
    cuda_graphs: bool = Field(True, description="Capture the usual sizes of step (cuda).")
    graph_tokens: int = Field(2048, ge=0, description="Largest captured step with prefill.")
    symmetric_memory: bool = Field(
        False, description="Small all-reduces of a stage's GPUs by torch's symmetric memory."
    )


class SchedulingSettings(_Section):
    """How each iteration is made up; the names are those of `actors.scheduling`."""

    policy: str = Field("sarathi", description="sarathi, vllm, orca, faster_transformer, ...")
    policy_options: dict[str, Any] = Field(default_factory=dict)
    order: str = Field("auto", description="Order of the queue; auto is the policy's own.")
    order_options: dict[str, Any] = Field(default_factory=dict)
    token_budget: int = Field(512, ge=1, description="Tokens per iteration, decodes included.")
    budget: str = Field("fixed", description="fixed, throttled (by KV), profiled or adaptive.")
    budget_options: dict[str, Any] = Field(default_factory=dict)
    admission: str = Field("all", description="all, predicted_peak or predictive.")
    admission_options: dict[str, Any] = Field(default_factory=dict)
    cost_model: str | None = Field(None, description="File of a fitted cost model.")
    max_requests: int = Field(128, ge=1, description="Most requests running at once.")
    max_step_tokens: int = Field(8192, ge=1, description="What the stages' buffers hold.")
    max_chunk: int | None = Field(None, ge=1, description="Cap of one prompt's share of a step.")
    tile: int = Field(1, ge=1, description="Steps with prefill are rounded to multiples of this.")
    lookahead: bool = Field(True, description="Plan step N+1 while step N runs (one stage).")
    micro_batches: Literal["greedy", "uniform"] = "greedy"
    allocation: Literal["prompt", "chunk"] = "prompt"
    swap: Literal["never", "always", "auto"] = "auto"
    watermark: float = Field(0.01, ge=0, lt=1, description="Share of KV kept free at admission.")
    max_queued_requests: int | None = Field(None, ge=1)
    max_queued_tokens: int | None = Field(None, ge=1)
    max_running_per_tenant: int | None = Field(None, ge=1)
    max_queued_per_tenant: int | None = Field(None, ge=1)
    queue_timeout_s: float | None = Field(None, gt=0)


class SloSettings(_Section):
    tbt_ms: float | None = Field(None, gt=0, description="Objective: P99 time between tokens.")
    ttft_ms: float | None = Field(None, gt=0, description="Objective: time to first token.")


class KVSettings(_Section):
    block_size: int = Field(16, ge=1, description="Tokens per block; flash_attn needs 256.")
    memory_gib: float | None = Field(None, gt=0, description="Per rank; measured if absent.")
    memory_fraction: float = Field(0.25, gt=0, le=0.98, description="Of what is available.")
    swap_gib: float = Field(0.0, ge=0, description="Host memory for swapped-out requests.")
    prefix_cache: bool = True
    dtype: Literal["auto", "int8", "fp8"] = "auto"


class EngineSettings(_Section):
    step_deadline_s: float = Field(20.0, gt=0)
    load_timeout_s: float = Field(1800.0, gt=0)
    max_rebuilds: int = Field(3, ge=0)


class TelemetrySettings(_Section):
    directory: str | None = Field(None, description="Parquet logs go here; none if absent.")
    events: bool = Field(False, description="Also record every scheduling event, for replay.")
    spans_to: str | None = Field(
        None,
        description="OTLP/HTTP endpoint for OpenTelemetry spans, such as "
        "http://127.0.0.1:4318/v1/traces; none if absent.",
    )


class Settings(_Section):
    """The whole of a deployment's `args`."""

    model: ModelSettings
    parallel: ParallelSettings = ParallelSettings()
    scheduling: SchedulingSettings = SchedulingSettings()
    slo: SloSettings = SloSettings()
    kv: KVSettings = KVSettings()
    engine: EngineSettings = EngineSettings()
    api: ApiOptions = Field(ApiOptions(), description="Guard rails: app/api/README.md.")
    telemetry: TelemetrySettings = TelemetrySettings()
    listen: str | None = Field(
        None,
        pattern=r"^(\[[0-9a-fA-F:]+\]|[^:\[\]]+):\d{1,5}$",
        description="host:port where the replica itself answers HTTP, without any proxy: for one "
        "replica, beside `proxy_location: Disabled`.",
    )

    @field_validator("listen")
    @classmethod
    def _port_exists(cls, value: str | None) -> str | None:
        if value is not None and not 1 <= int(value.rpartition(":")[2]) <= 65535:
            raise ValueError("the port must lie between 1 and 65535")
        return value

    @property
    def listen_address(self) -> tuple[str, int]:
        """Host and port of `listen`."""
        host, _, port = (self.listen or "").rpartition(":")
        return host.strip("[]"), int(port)


def parse(args: Mapping[str, Any]) -> Settings:
    """Validate `args`; raises SettingsError with one line per problem, keys dotted."""
    try:
        return Settings.model_validate(args)
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            key = ".".join(str(part) for part in problem["loc"])
            message = problem["msg"]
            if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
                message = f"unknown setting{_suggestion(problem['loc'])}"
            lines.append(f"{key}: {message}")
        raise SettingsError("; ".join(lines)) from error


def _suggestion(location: tuple[int | str, ...]) -> str:
    section: Any = Settings
    for part in location[:-1]:
        section = section.model_fields[str(part)].annotation
    known = getattr(section, "model_fields", None) or section.__dataclass_fields__
    close = difflib.get_close_matches(str(location[-1]), known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def model_config(path: str) -> dict[str, Any]:
    """The model folder's config.json. Raises SettingsError naming what is missing."""
    folder = Path(path)
    if not folder.is_dir():
        raise SettingsError(f"model.path: no folder {path!r}")
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError:
        raise SettingsError(f"model.path: {path!r} holds no config.json") from None
    except ValueError as error:
        raise SettingsError(f"model.path: {file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise SettingsError(f"model.path: {file} is not a JSON object")
    return config


def resolve(settings: Settings) -> EngineConfig:
    """Frozen engine settings from validated ones and the model's config.json.

    Raises SettingsError naming the setting that cannot be.
    """
    model, parallel, scheduling, kv = (
        settings.model, settings.parallel, settings.scheduling, settings.kv
    )  # fmt: skip
    config = model_config(model.path)
    limit = int(config.get("max_position_embeddings") or 4096)
    if model.max_model_len is not None and model.max_model_len > limit:
        raise SettingsError(
            f"model.max_model_len: {model.max_model_len} exceeds the model's {limit} positions"
        )
    max_model_len = model.max_model_len or limit
    stages = parallel.pipeline_stages
    if stages > int(config.get("num_hidden_layers") or stages):
        raise SettingsError(
            f"parallel.pipeline_stages: {stages} stages for {config['num_hidden_layers']} layers"
        )
    # Whole-prompt policies put a full prompt into one step, on top of everybody's decodes.
    max_step_tokens = max(
        scheduling.max_step_tokens, scheduling.token_budget + scheduling.max_requests
    )
    stage = StageSpec(
        model_path=str(Path(model.path).resolve()),
        num_stages=stages,
        tensor_ranks=parallel.tensor_ranks,
        load_format=model.load_format,
        dtype=model.dtype,
        kv_dtype=kv.dtype,
        quantization=model.quantization,
        backend=parallel.backend,
        device=parallel.device,
        block_size=kv.block_size,
        max_requests=scheduling.max_requests,
        max_model_len=max_model_len,
        max_step_tokens=max_step_tokens,
        num_threads=parallel.threads_per_rank,
        seed=model.seed,
        cuda_graphs=parallel.cuda_graphs,
        graph_tokens=parallel.graph_tokens,
        symmetric_memory=parallel.symmetric_memory,
    )
    gpus = parallel.gpus_per_rank
    if gpus is None:
        gpus = 1.0 if parallel.device == "cuda" else 0.0
    accelerator = _accelerator(parallel, gpus)
    if parallel.symmetric_memory and parallel.device != "cuda":
        raise SettingsError("parallel.symmetric_memory: needs parallel.device: cuda")
    activation_bytes = 4 * int(config.get("hidden_size") or 0) * max_step_tokens
    return EngineConfig(
        stage=stage,
        scheduler=_scheduler(settings, max_model_len, max_step_tokens),
        kv=KVMemory(kv.memory_gib, kv.memory_fraction, kv.swap_gib),
        transport=parallel.transport,
        accelerator=accelerator,
        channel_bytes=(1 << 20) + (activation_bytes if stages > 1 else 0),
        cpus_per_rank=parallel.cpus_per_rank,
        gpus_per_rank=gpus,
        step_deadline_s=settings.engine.step_deadline_s,
        load_timeout_s=settings.engine.load_timeout_s,
        event_log=settings.telemetry.directory if settings.telemetry.events else None,
        max_rebuilds=settings.engine.max_rebuilds,
    )


def _accelerator(parallel: ParallelSettings, gpus_per_rank: float) -> str | None:
    """The device type that activations travel between, None for host memory."""
    conditions = {
        "parallel.device: cuda": parallel.device == "cuda",
        "parallel.transport: graph": parallel.transport == "graph",
        "a whole GPU per rank (parallel.gpus_per_rank: 1)": gpus_per_rank >= 1,
    }
    missing = [wish for wish, met in conditions.items() if not met]
    if parallel.activations == "accelerator" and missing:
        raise SettingsError(f"parallel.activations: accelerator needs {' and '.join(missing)}")
    return None if missing or parallel.activations == "memory" else parallel.device


def _scheduler(settings: Settings, max_model_len: int, max_step_tokens: int) -> SchedulerConfig:
    values = settings.scheduling.model_dump(exclude={"cost_model", "max_step_tokens"})
    cost_model = None
    if settings.scheduling.cost_model is not None:
        cost_model = read_cost_model(settings.scheduling.cost_model)
    slo = settings.slo
    scheduler = SchedulerConfig(
        num_blocks=1,  # filled in once the stages have reported their memory
        block_size=settings.kv.block_size,
        prefix_cache=settings.kv.prefix_cache,
        num_stages=settings.parallel.pipeline_stages,
        max_model_len=max_model_len,
        max_step_tokens=max_step_tokens,
        cost_model=cost_model,
        tbt_s=None if slo.tbt_ms is None else slo.tbt_ms / 1000,
        ttft_s=None if slo.ttft_ms is None else slo.ttft_ms / 1000,
        **values,
    )
    try:
        check_config(scheduler)
    except ConfigError as error:
        raise SettingsError(f"scheduling.{error}") from error
    return scheduler


def read_cost_model(path: str) -> dict[str, Any]:
    """A fitted cost model's numbers (JSON or YAML)."""
    try:
        loaded = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise SettingsError(f"scheduling.cost_model: {path}: {error}") from error
    if not isinstance(loaded, dict):
        raise SettingsError(f"scheduling.cost_model: {path} is not a mapping")
    return loaded
