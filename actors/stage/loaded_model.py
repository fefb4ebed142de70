"""A rank's part of a model, loaded: the one that is served, or one that drafts for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from actors.stage.kv import KVCache
from actors.stage.models.alibi import alibi_table
from actors.stage.models.config import DecoderConfig, ModelError
from actors.stage.models.decoder import Decoder, StageWeights
from actors.stage.models.read import load_config
from actors.stage.models.split import Split, split
from actors.stage.spec import StageSpec
from actors.stage.states import ROWS_OF_REQUEST, RecurrentStates
from actors.stage.weights.folder import open_folder
from actors.stage.weights.load import Loader
from actors.transport.group import RankGroup
from kernels.interface import AttentionShape, Backend
from kernels.recurrence import Mixer
from kernels.registry import BackendError, resolve_backend

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Weights packed by a backend, and the decoder over them. max_model_len: tokens."""

    config: DecoderConfig
    part: Split
    weights: StageWeights
    decoder: Decoder
    backend: Backend
    group: RankGroup
    shape: AttentionShape
    dtype: torch.dtype
    kv_dtype: torch.dtype
    block_size: int
    max_model_len: int
    num_parameters: int
    measures_attention: bool = True

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one KV block over all layers of this rank."""
        shapes = self.decoder.cached_shapes
        size = self.backend.kv_block_bytes
        return sum(size(self.block_size, shape, self.kv_dtype) for shape in shapes)

    @property
    def state_bytes(self) -> int:
        """Bytes of one request's states over all layers of this rank."""
        return ROWS_OF_REQUEST * sum(mixer.state_bytes for mixer in self._mixers)

    @property
    def _mixers(self) -> list[Mixer]:
        found = (
            layer.beside.mixer if layer.beside else layer.mixer for layer in self.weights.layers
        )
        return [mixer for mixer in found if mixer is not None]

    def make_cache(
        self, num_blocks: int, num_host_blocks: int = 0, num_requests: int = 0
    ) -> tuple[KVCache, RecurrentStates | None]:
        """A KV cache of this many device and host blocks, and states of so many requests if layers
        keep them, which the decoder uses from now on."""
        if self.measures_attention:
            device = self.decoder.device
            self.backend.measure_attention(
                self.decoder.shapes, self.kv_dtype, self.block_size, device
            )
        cache = KVCache(
            self.backend, self.decoder.cached_shapes, num_blocks, num_host_blocks,
            self.block_size, self.kv_dtype, self.decoder.device,
        )  # fmt: skip
        if not self._mixers:
            self.decoder.attach(cache.layers)
            return cache, None
        states = RecurrentStates(self._mixers, num_requests, self.decoder.device)
        kv, state = iter(cache.layers), iter(states.layers)
        layers = self.weights.layers
        caches = [next(state if w.mixer else kv) for w in layers]
        self.decoder.attach(caches, [next(state) for w in layers if w.beside])
        return cache, states


def load_model(spec: StageSpec, progress: Callable[[float], None]) -> LoadedModel:
    """Read this rank's weights and join the stage's other ranks.

    progress is called with the fraction done, 0 to 1. Raises ModelError (a ValueError) naming the
    file where the folder cannot be served, BackendError where the backend cannot run here.
    """
    folder, device = Path(spec.model_path), torch.device(spec.device)
    config = load_config(folder, spec.ignored_config_keys)
    part = split(config, spec)
    backend, dtype, kv_dtype = choose_backend(spec, config)
    if spec.num_threads and device.type == "cpu":
        backend.set_num_threads(spec.num_threads)
    max_model_len = min(spec.max_model_len, config.max_model_len)
    shape = _attention_shape(config, part, max_model_len, device)
    with open_folder(folder, config, spec, dtype, device) as (source, packed):
        loader = Loader(source, config, part, spec, backend, device, dtype, packed)
        weights = loader.stage(max_model_len, progress)
    group = RankGroup(spec.rank, spec.tensor_ranks, spec.group_address, device)
    group.use_shared_memory(backend.shared_memory_all_reduce)
    if spec.symmetric_memory:
        group.use_symmetric_memory(dtype, config.hidden_size)
    return LoadedModel(
        config=config,
        part=part,
        weights=weights,
        decoder=Decoder(weights, backend, shape, config, group),
        backend=backend,
        group=group,
        shape=shape,
        dtype=dtype,
        kv_dtype=kv_dtype,
        block_size=spec.block_size,
        max_model_len=max_model_len,
        num_parameters=loader.num_parameters,
        measures_attention=spec.one_launch_attention,
    )


def choose_backend(
    spec: StageSpec, config: DecoderConfig
) -> tuple[Backend, torch.dtype, torch.dtype]:
    """The backend that computes this model as specified, and the dtypes of its activations and its
    KV cache. Raises ModelError, BackendError where none does here, naming the setting."""
    dtype = _dtype(config.dtype if spec.dtype == "auto" else spec.dtype)
    narrow = None if spec.kv_dtype in ("auto", *_DTYPES) else spec.kv_dtype
    try:
        backend = resolve_backend(
            spec.backend, spec.device, dtype, spec.block_size, narrow, config.widest_head
        )
    except BackendError as error:
        key = "kv.dtype" if spec.backend == "auto" and narrow else "parallel.backend"
        raise BackendError(f"{key}: {error}") from error
    kv_dtype = _kv_dtype(spec.kv_dtype, dtype, backend)
    known = ("none", *backend.quantizations)
    if spec.quantization not in known:
        raise ModelError(
            f"model.quantization: backend {backend.name!r} has no {spec.quantization!r}; it has "
            f"{', '.join(known)}"
        )
    if problem := backend.unsupported_quantization(spec.quantization):
        raise ModelError(f"model.quantization: {problem}")
    return backend, dtype, kv_dtype


def _dtype(name: str) -> torch.dtype:
    dtype = _DTYPES.get(name.removeprefix("torch."))
    if dtype is None:
        raise ModelError(f"dtype {name!r} is not supported; supported: {', '.join(_DTYPES)}")
    return dtype


def _kv_dtype(name: str, model_dtype: torch.dtype, backend: Backend) -> torch.dtype:
    if name == "auto":
        return model_dtype
    kinds = {**_DTYPES, **backend.kv_dtypes}
    if name not in kinds:
        supported = ", ".join(("auto", *kinds))
        raise ModelError(f"kv.dtype: backend {backend.name!r} has no {name!r}; it has {supported}")
    return kinds[name]


def _attention_shape(
    config: DecoderConfig, part: Split, num_positions: int, device: torch.device
) -> AttentionShape:
    alibi_NP = None
    if config.alibi is not None:
        heads = slice(part.q[0] // config.head_dim, part.q[1] // config.head_dim)
        alibi_NP = alibi_table(config.alibi, num_positions, heads).to(device)
    return AttentionShape(
        part.num_heads,
        part.num_kv_heads,
        config.head_dim,
        config.attention_scale,
        chunked=config.chunked_windows,
        norms_last=config.norms_last,
        softcap=config.attention_softcap,
        alibi_NP=alibi_NP,
    )
