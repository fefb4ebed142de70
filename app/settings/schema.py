"""The schema of a deployment's `args` in YAML, section by section.

What the scheduler declares (`actors.scheduling.config`) is taken from there, so that a setting has
one type, one default and one description.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, create_model, field_validator
from pydantic.fields import FieldInfo

from actors.scheduling.config import KINDS, SETTINGS, SchedulerConfig
from actors.stage.spec import MOST_THREADS
from app.api.http.options import ApiOptions
from app.settings.adapters import AdapterSettings
from app.settings.batches import BatchSettings
from app.settings.fleet import FleetSettings


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelSettings(_Section):
    path: str = Field(
        description="Hugging Face folder (config.json, *.safetensors, tokenizer), GGUF file (of "
        "parts, the first), or name on the hub: `org/name` or `org/name/file.gguf`, with "
        "`@revision` or without."
    )
    name: str | None = Field(
        None, description="Name clients use; the folder's name, or `org/name`, if absent."
    )
    ignore_config_keys: tuple[str, ...] = Field(
        (),
        description="Keys of config.json that change nothing, although a start refuses them as "
        "unknown; one within another as `outer.inner`.",
    )
    load_format: Literal["auto", "dummy"] = Field(
        "auto", description="dummy: random weights from config.json alone, for measurements."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Of weights and activations; auto is what config.json says."
    )
    quantization: Literal["none", "int8", "int4", "w8a8", "w4a8", "fp8", "fp8_w8a8"] = Field(
        "none",
        description="Weights quantized at load. w8a8, w4a8 (on CPUs) and fp8_w8a8 round "
        "activations to 8 bits too; fp8 and fp8_w8a8 are for GPUs. GPTQ and AWQ folders need "
        "nothing here.",
    )
    max_model_len: int | None = Field(
        None,
        gt=0,
        description="Longest prompt plus output, in tokens; if absent the model's own, up to 2^20.",
    )
    chat_template: str | None = Field(
        None, description="File of a Jinja chat template; the model's own if absent."
    )
    tool_parser: Literal[
        "auto", "none", "apertus", "cohere", "deepseek_v3", "deepseek_v31", "deepseek_v32",
        "deepseek_v4", "dots", "functionary", "functiongemma", "gemma4", "gigachat3", "glm4",
        "glm45", "granite", "granite_20b", "harmony", "hermes", "hunyuan", "hunyuan_v3",
        "hunyuan_v3_open", "internlm", "kimi_k2", "kimi_k3", "lfm2", "llama3_json", "longcat",
        "minicpm3", "minicpm5", "minimax_m1", "minimax_m2", "mistral", "nemotron", "olmo3",
        "phi4_mini", "plamo3", "pythonic", "qwen3_coder", "seed_oss", "solar_open", "step3",
        "tool_code", "xlam",
    ] = Field(
        "auto", description="How the model writes tool calls; auto: as its chat template shows."
    )  # fmt: skip
    reasoning_parser: Literal[
        "auto", "none", "apertus", "cohere", "ernie", "gemma4", "granite", "harmony", "hunyuan",
        "hunyuan_v3_open", "kimi_k3", "longcat", "minicpm3", "mistral", "plamo3", "seed_oss",
        "solar_open", "think",
    ] = Field(
        "auto", description="How it writes reasoning; auto: as its chat template shows; none: text."
    )  # fmt: skip
    sampling_defaults: Literal["model", "openai"] = Field(
        "model",
        description="Sampling over HTTP where a request does not say. model: what "
        "generation_config.json recommends; openai: temperature 1, all tokens, no penalty.",
    )
    seed: int = Field(0, ge=0, description="Dummy weights are drawn from it.")


class ParallelSettings(_Section):
    pipeline_stages: int = Field(1, ge=1, description="Parts the layers are split into.")
    tensor_ranks: int = Field(1, ge=1, description="Ranks of each stage (tensor parallelism).")
    transport: Literal["graph", "call"] = Field(
        "graph", description="Ray compiled graph, or plain actor calls."
    )
    activations: Literal["auto", "memory", "accelerator"] = Field(
        "auto",
        description="Between stages: shared memory, or GPU to GPU through the graph; auto takes "
        "the latter where every rank has a GPU of its own.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where the ranks compute; auto is cuda where Ray knows of GPUs."
    )
    backend: Literal["auto", "cpu", "torch", "triton", "flash_attn"] = Field(
        "auto", description="Kernels; auto takes the fastest that the device has."
    )
    threads_per_rank: int = Field(
        0, ge=0, le=MOST_THREADS, description="0: cores shared by the ranks."
    )
    cpus_per_rank: float = Field(0.5, ge=0, description="Ray resources reserved per rank.")
    gpus_per_rank: float | None = Field(
        None, ge=0, description="1 on cuda if absent; below 1, also the part of a GPU's memory."
    )
    cuda_graphs: bool = Field(True, description="Capture the usual sizes of step (cuda).")
    graph_tokens: int = Field(2048, ge=0, description="Largest captured step with prefill.")
    symmetric_memory: bool = Field(
        False,
        description="Small all-reduces of a stage's GPUs, joined by NVLink, by torch's symmetric "
        "memory.",
    )
    one_launch_attention: bool = Field(
        True,
        description="Attention of decodes and chunks in one launch where that measures faster at "
        "start (backend triton); false: always in two.",
    )


_AnySection = TypeVar("_AnySection", bound=_Section)


def _declared(section: str) -> Callable[[type[_AnySection]], type[_AnySection]]:
    """Adds to a class what `SchedulerConfig` declares for this section."""
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(SchedulerConfig):
        setting = SETTINGS[field.name]
        if setting.hidden or setting.section != section:
            continue
        kind: Any = Literal[setting.choices] if setting.choices else KINDS[field.name]
        if setting.choices and field.default is None:
            kind = kind | None
        default: dict[str, Any] = {"default": setting.in_yaml(field.default)}
        if field.default_factory is not dataclasses.MISSING:
            default = {"default_factory": field.default_factory}
        info = Field(
            **default,
            description=setting.description,
            ge=setting.at_least,
            le=setting.at_most,
            gt=setting.above,
            lt=setting.below,
            json_schema_extra={"live": setting.live},
        )
        fields[setting.key(field.name)] = (str | None if setting.file else kind, info)
    return lambda own: create_model(own.__name__, __base__=own, __doc__=own.__doc__, **fields)


@_declared("scheduling")
class SchedulingSettings(_Section):
    """How each iteration is made up."""


@_declared("slo")
class SloSettings(_Section):
    """Objectives of requests that state none."""


@_declared("speculation")
class SpeculationSettings(_Section):
    """Tokens guessed ahead and verified together; the text never depends on it."""


@_declared("kv")
class KVSettings(_Section):
    memory_gib: float | None = Field(None, gt=0, description="Per rank; measured if absent.")
    memory_fraction: float | None = Field(
        None,
        gt=0,
        le=0.98,
        description="Of the memory that weights, graphs and the largest step leave; 0.9 on GPUs "
        "and 0.25 on CPUs if absent. Between GPUs of several stages, NCCL takes from the rest.",
    )
    swap_gib: float = Field(0.0, ge=0, description="Host memory for swapped-out requests.")
    host_cache_gib: float = Field(
        0.0, ge=0, description="Host memory, per rank, for blocks of the prefix cache; 0: none."
    )
    disk_cache_gib: float = Field(
        0.0, ge=0, description="Likewise on disk, where they survive a restart."
    )
    disk_cache_path: str | None = Field(
        None, description="Folder for those; in the user's cache folder if absent."
    )
    shared_cache_gib: float = Field(
        0.0,
        ge=0,
        description="Likewise in memory that a fleet's engines share, between nodes by TCP: a "
        "stream that moves is fetched, not recomputed. Per rank of each engine.",
    )
    shared_cache_path: str | None = Field(
        None, description="Folder for those; in `/dev/shm` if absent."
    )
    direct_gib: float = Field(
        0.0,
        ge=0,
        description="Memory of each rank's device for blocks that go to other engines' devices "
        "without passing host memory: by NCCL between GPUs, where it has not run yet, by gloo "
        "between CPUs; 0: none.",
    )
    dtype: Literal["auto", "int8", "fp8"] = Field(
        "auto",
        description="Keys and values as they are stored; auto is the model's dtype. fp8 (e4m3) has "
        "no scale: numbers beyond 448 are stored as 448.",
    )


class EngineSettings(_Section):
    calibrate: bool = Field(
        True,
        description="Measure steps at the first start, where a cost model is wanted and none is "
        "given, and keep it in the user's cache folder (`$LEGATO_CACHE`) for later starts.",
    )
    step_deadline_s: float = Field(
        20.0, gt=0, description="A step that takes longer is taken for dead: stages are rebuilt."
    )
    request_deadline_s: float = Field(
        3600.0, gt=0, description="A request that is not done by then ends with an error."
    )
    load_timeout_s: float = Field(
        1800.0, gt=0, description="For loading the weights, and their download."
    )
    standby: bool | None = Field(
        None,
        description="Keep a process per rank that has imported everything (200 MB), so that lost "
        "stages are rebuilt sooner; absent: on CPUs, where alone it is possible.",
    )
    max_rebuilds: int = Field(
        3, ge=0, description="In a row, without a step between them; then the replica fails."
    )


class TelemetrySettings(_Section):
    directory: str | None = Field(
        None, description="Parquet logs go here; none if absent. They grow: remove old files."
    )
    events: bool = Field(False, description="Also record every scheduling event, for replay.")
    events_gib: float = Field(
        1.0, gt=0, description="Recording of events ends at this size; what is there is complete."
    )
    spans_to: str | None = Field(
        None,
        description="OTLP/HTTP endpoint for OpenTelemetry spans, such as "
        "http://127.0.0.1:4318/v1/traces; none if absent.",
    )

    @field_validator("directory")
    @classmethod
    def _expanded(cls, path: str | None) -> str | None:
        return path and os.path.expanduser(path)


class Settings(_Section):
    """The whole of a deployment's `args`."""

    model: ModelSettings
    parallel: ParallelSettings = ParallelSettings()
    scheduling: SchedulingSettings = SchedulingSettings()
    slo: SloSettings = SloSettings()
    kv: KVSettings = KVSettings()
    speculation: SpeculationSettings = SpeculationSettings()
    engine: EngineSettings = EngineSettings()
    api: ApiOptions = ApiOptions()
    telemetry: TelemetrySettings = TelemetrySettings()
    fleet: FleetSettings | None = Field(
        None, description="Absent: every replica is a front and an engine in one."
    )
    adapters: AdapterSettings | None = Field(
        None, description="Absent: none. With `models`, in their entries."
    )
    batches: BatchSettings | None = Field(BatchSettings(), description="null: none.")
    listen: str | None = Field(
        None,
        pattern=r"^(\[[0-9a-fA-F:]+\]|[^:\[\]]+):\d{1,5}$",
        description="host:port where the replica itself answers HTTP, without any proxy: for one "
        "replica or the fronts of a fleet, beside `proxy_location: Disabled`.",
    )

    @field_validator("slo", mode="before")
    @classmethod
    def _slo_by_rule(cls, value: Any) -> Any:
        """`slo: strict` for `slo: {tbt_rule: strict}`."""
        return {"tbt_rule": value} if isinstance(value, str) else value

    @field_validator("listen")
    @classmethod
    def _port_exists(cls, value: str | None) -> str | None:
        if value is not None and not 1 <= int(value.rpartition(":")[2]) <= 65535:
            raise ValueError("the port must lie between 1 and 65535")
        return value

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Those of `adapters.paths`."""
        return () if self.adapters is None else tuple(self.adapters.paths)

    @property
    def listen_address(self) -> tuple[str, int]:
        """Host and port of `listen`."""
        host, _, port = (self.listen or "").rpartition(":")
        return host.strip("[]"), int(port)


def fields_of(section: Any) -> Mapping[str, FieldInfo]:
    """The settings of a section, a model or a dataclass; empty for a value."""
    found: Mapping[str, FieldInfo] = getattr(section, "model_fields", {})
    return found or getattr(section, "__pydantic_fields__", {})
