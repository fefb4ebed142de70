"""GPTQ and AWQ folders: integer weights read as stored and cut for a rank.

Each rank reads whole layers and keeps its part, because groups and input order complicate slicing
the file, and at four bits per weight a layer is small.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from actors.stage.models.config import ModelError
from actors.stage.models.keys import is_neutral
from actors.stage.weights.checkpoint import Checkpoint
from actors.stage.weights.source import Shard
from kernels.gptq_awq import unpack_awq, unpack_gptq
from kernels.quantized import QuantizedWeight

PACKED_ENDINGS = (".qweight", ".qzeros", ".scales", ".g_idx")
# Keys that are read here, or without effect on the stored weights: how they were found, which
# layers have them (as the tensors say), and how other implementations compute with them.
_KNOWN = frozenset((
    "quant_method", "method", "bits", "group_size", "checkpoint_format", "format", "version",
    "is_marlin_format", "desc_act", "sym", "zero_point", "pack_dtype", "q_group_size", "w_bit",
    # how they were found
    "act_group_aware", "amp", "autoround_version", "batch_size", "block_name_to_quantize",
    "cache_block_outputs", "damp_auto_increment", "damp_percent", "data_type", "dataset",
    "enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input",
    "gradient_accumulate_steps", "iters", "low_gpu_mem_usage", "lr", "lr_scheduler",
    "max_input_length", "minmax_lr", "model_seqlen", "module_name_preceding_first_block", "mse",
    "not_use_best_mse", "nsamples", "offload_to_disk", "pad_token_id", "sampler", "scale_dtype",
    "seqlen", "static_groups", "to_quant_block_names", "tokenizer", "train_bs",
    "true_sequential", "use_quant_input", "v2", "v2_alpha",
    # which layers have them
    "lm_head", "modules_in_block_to_quantize", "modules_to_not_convert",
    # names, versions and kernels
    "backend", "disable_exllama", "do_fuse", "exllama_config", "fuse_max_seq_len", "meta",
    "model_file_base_name", "model_name_or_path", "modules_to_fuse", "provider", "quantizer",
    "use_cuda_fp16", "use_exllama", "use_triton",
))  # fmt: skip


class PackedLayers:
    """The quantized linear layers of a folder, by name (without the ending)."""

    def __init__(self, checkpoint: Checkpoint, config: dict[str, Any]) -> None:
        """config: `quantization_config` of config.json. Raises ModelError for an unsupported
        format, naming the supported ones, and for an unknown key that may change results."""
        self._checkpoint = checkpoint
        self._last: tuple[str, QuantizedWeight] | None = None  # unpacked layer
        self._method = config["quant_method"]
        self._bits = config.get("bits", 4)
        # Tools that leave it out have 128, as transformers takes it to be.
        self._group = config.get("group_size", config.get("q_group_size", 128))
        self._format = str(config.get("checkpoint_format") or config.get("format") or "gptq")
        where = f"{checkpoint.folder / 'config.json'}: quantization_config"
        if self._method == "gptq":
            if self._bits not in (4, 8):
                raise ModelError(f"{where}: bits {self._bits} of GPTQ; supported: 4 and 8")
            if self._format not in ("gptq", "gptq_v2") or config.get("is_marlin_format"):
                raise ModelError(f"{where}: GPTQ format {self._format!r}; supported: gptq, gptq_v2")
        elif self._bits != 4 or str(config.get("version", "gemm")).lower() != "gemm":
            raise ModelError(f"{where}: AWQ other than 4 bits, version gemm")
        if isinstance(self._group, bool) or not isinstance(self._group, int):
            raise ModelError(f"{where}: group_size {self._group!r} is not a size")
        for key, value in config.items():
            # GPTQModel's rules by layer: those with "-" only leave layers out.
            is_rules = key == "dynamic" and isinstance(value, dict)
            leaves_out = is_rules and all(rule.startswith("-") for rule in value)
            if key not in _KNOWN and not leaves_out and not is_neutral(key, value):
                raise ModelError(f"{where}: {key} is not supported (it is {str(value)[:80]})")

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Check the names and shapes of the tensors of a layer of `shape` (out, in features);
        values are checked when read. Raises ModelError naming the file."""
        (rows, columns), per_word = shape, 32 // self._bits
        groups = -(-columns // self._group) if self._group > 0 else 1
        zeros = (groups, rows // per_word)
        words = (columns // per_word, rows) if self._method == "gptq" else (columns, zeros[1])
        wanted = {"qweight": words, "qzeros": zeros, "scales": (groups, rows)}
        for ending, size in wanted.items():
            found = self._checkpoint.shape_of(f"{name}.{ending}")
            if found != size:
                shard = self._checkpoint.file_of(f"{name}.{ending}")
                raise ModelError(
                    f"{shard}: layer {name}: {ending} has shape {found}, a layer of {rows} x "
                    f"{columns} with {self._bits} bits and group_size {self._group} has {size}"
                )

    def __contains__(self, name: str) -> bool:
        return f"{name}.qweight" in self._checkpoint.names

    def has_bias(self, name: str) -> bool:
        return f"{name}.bias" in self._checkpoint.names

    def among(self, names: Iterable[str]) -> set[str]:
        """The named layers that are stored quantized."""
        return {name for name in names if name in self}

    def read(self, name: str, shape: tuple[int, ...], part: Shard) -> QuantizedWeight:
        """The part of layer `name`, whose whole weight must be `shape` (out, in features).

        Raises ModelError if its tensors do not fit, or a rank's part would cut a group.
        """
        shard = self._checkpoint.file_of(f"{name}.qweight")
        try:
            weight = self._unpack(name)
            found = tuple(weight.values_OK.shape)
            if found != shape:
                raise ModelError(f"{shard}: layer {name} is {found}, the config says {shape}")
            if part.rows is not None:
                weight = weight.rows(*part.rows)
            if part.columns is not None and part.columns != (0, shape[1]):
                weight = weight.columns(*part.columns)
        except ValueError as bad:
            if isinstance(bad, ModelError):
                raise
            raise ModelError(f"{shard}: layer {name}: {bad}") from bad
        return weight

    def _unpack(self, name: str) -> QuantizedWeight:
        """The last one is kept: its pieces are read one after another."""
        if self._last is None or self._last[0] != name:
            self._last = None  # makes room
            self._last = (name, self._unpack_whole(name))
        return self._last[1]

    def _unpack_whole(self, name: str) -> QuantizedWeight:
        raw = self._checkpoint.read_raw
        words, zeros = raw(f"{name}.qweight"), raw(f"{name}.qzeros")
        scales_GO = raw(f"{name}.scales")
        if self._method == "awq":
            return unpack_awq(words, zeros, scales_GO, group_size=self._group)
        order = f"{name}.g_idx"
        index_K = raw(order) if order in self._checkpoint.names else None
        return unpack_gptq(
            words, zeros, scales_GO, index_K, self._bits, self._format, group_size=self._group
        )
