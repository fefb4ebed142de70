"""Reads `quantization_config` of weights stored with scales: compressed-tensors and float8.

An unknown key that could change the meaning of the weights is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from actors.stage.models.config import ModelError
from kernels.quantized import InputRounding

FLOAT8 = "fp8"
COMPRESSED = "compressed-tensors"
_STRATEGIES = ("tensor", "channel", "group", "block")
FORMATS = {
    "pack-quantized": ("int", (4, 8)),
    "int-quantized": ("int", (8,)),
    "float-quantized": ("float", (8,)),
}
# Keys without effect on the stored weights: of the tool, or of layers that the tensors imply.
_TOP = {
    "quant_method", "format", "config_groups", "ignore", "quantization_status", "version",
    "global_compression_ratio",
}  # fmt: skip
_GROUP = {"targets", "weights", "input_activations", "output_activations", "format"}
_WEIGHTS = {
    "num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "actorder",
    "observer", "observer_kwargs", "scale_dtype", "zp_dtype", "dynamic",
}  # fmt: skip
_BY_TOKEN = {"num_bits": 8, "strategy": "token", "symmetric": True, "dynamic": True}
_FLOAT8 = {
    "quant_method", "fmt", "weight_block_size", "activation_scheme", "modules_to_not_convert",
    "ignored_layers", "scale_fmt", "dequantize",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the weights of a folder are stored.

    kind: "packed" (words of several numbers), "int8" or "float8". scale: ending of its tensor.
    group: inputs that share a scale, 0: a whole row. block: (rows, columns) that share a scale, if
    scales are per block. one_scale: one for the whole tensor. rounds_activations: the scheme
    quantizes activations. input_rounding: how `quantization: w8a8` or, for float8, `fp8_w8a8` does
    it; else they keep their type, so results differ slightly. Float8 whose activations have one
    scale, static or not, gets one for each token, which rounds less.
    """

    kind: str
    bits: int
    scale: str
    group: int = 0
    block: tuple[int, int] | None = None
    one_scale: bool = False
    symmetric: bool = True
    act_order: bool = False
    rounds_activations: bool = False
    input_rounding: InputRounding = "none"


def read_scheme(config: Mapping[str, Any], where: str) -> Scheme:
    """where: the file and the key of `config` in it. Raises ModelError naming them."""
    if config["quant_method"] == FLOAT8:
        return _float8(config, where)
    return _compressed(config, where)


def _float8(config: Mapping[str, Any], where: str) -> Scheme:
    _known(config, _FLOAT8, where)
    _one_of(config, "fmt", ("e4m3", None), where)
    _one_of(config, "activation_scheme", ("dynamic", "static", None), where)
    block = config.get("weight_block_size")
    if block is None:
        return Scheme(
            "float8", 8, "weight_scale", one_scale=True, rounds_activations=True,
            input_rounding="token",
        )  # fmt: skip
    return Scheme(
        "float8", 8, "weight_scale_inv", block=_block(block, f"{where}: weight_block_size"),
        rounds_activations=True, input_rounding="group",
    )  # fmt: skip


def _compressed(config: Mapping[str, Any], where: str) -> Scheme:
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format") == "dense":  # none
        config = {key: value for key, value in config.items() if key != "sparsity_config"}
    _known(config, _TOP, where)
    # frozen: saved without a compressor, in the stored form all the same, or else in floats, which
    # the tensors show.
    _one_of(config, "quantization_status", ("compressed", "frozen", None), where)
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ModelError(f"{where}: config_groups names no scheme")
    schemes = {
        name: _of_group(group, config, f"{where}: config_groups.{name}")
        for name, group in groups.items()
    }
    first = next(iter(schemes.values()))
    if any(scheme != first for scheme in schemes.values()):
        raise ModelError(f"{where}: config_groups of several schemes are not supported")
    return first


def _of_group(group: Any, config: Mapping[str, Any], where: str) -> Scheme:
    if not isinstance(group, dict):
        raise ModelError(f"{where} is not an object")
    _known(group, _GROUP, where)
    form = group.get("format") or config.get("format")
    if form not in FORMATS:
        raise ModelError(f"{where}: format {form!r} is not supported; supported: {_list(FORMATS)}")
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise ModelError(f"{where}.weights is missing")
    where = f"{where}.weights"
    _known(weights, _WEIGHTS, where)
    kind, widths = FORMATS[form]
    _one_of(weights, "type", (kind,), where)
    _one_of(weights, "num_bits", widths, where)
    _one_of(weights, "strategy", _STRATEGIES, where)
    _one_of(weights, "dynamic", (False, None), where)
    _one_of(weights, "actorder", (None, False, "weight", "static", "group"), where)
    strategy, symmetric = weights["strategy"], bool(weights.get("symmetric", True))
    if form == "float-quantized" and not symmetric:
        raise ModelError(f"{where}: symmetric False is not supported with format {form}")
    if strategy == "block" and form != "float-quantized":
        raise ModelError(f"{where}: strategy 'block' is not supported with format {form}")
    size = weights.get("group_size") if strategy == "group" else 0
    if not isinstance(size, int) or (strategy == "group" and size < 1):
        raise ModelError(f"{where}: group_size {size!r} is not a size")
    return Scheme(
        {"pack-quantized": "packed", "int-quantized": "int8", "float-quantized": "float8"}[form],
        weights["num_bits"],
        "weight_scale",
        group=size,
        block=_block(weights.get("block_structure"), f"{where}: block_structure")
        if strategy == "block"
        else None,
        one_scale=strategy == "tensor",
        symmetric=symmetric,
        act_order=weights.get("actorder") == "group",
        rounds_activations=any(
            group.get(key) is not None for key in ("input_activations", "output_activations")
        ),
        input_rounding="none" if group.get("output_activations") is not None
        else _input_rounding(group.get("input_activations"), kind, strategy),
    )  # fmt: skip


def _input_rounding(activations: Any, kind: str, strategy: str) -> InputRounding:
    if not isinstance(activations, dict):
        return "none"
    if (activations.get("type"), activations.get("num_bits")) != (kind, 8):
        return "none"
    if kind == "float":
        return "group" if strategy == "block" else "token"
    is_by_token = {key: activations.get(key) for key in _BY_TOKEN} == _BY_TOKEN
    return "token" if is_by_token else "none"


def _block(value: Any, where: str) -> tuple[int, int]:
    fits = isinstance(value, list | tuple) and len(value) == 2
    if not fits or not all(isinstance(size, int) and size > 0 for size in value):
        raise ModelError(f"{where} {value!r} is not two sizes")
    return value[0], value[1]


def _known(config: Mapping[str, Any], known: set[str], where: str) -> None:
    for key, value in config.items():
        if key not in known and value:
            raise ModelError(f"{where}: {key} is not supported (it is {str(value)[:80]})")


def _one_of(config: Mapping[str, Any], key: str, known: Iterable[Any], where: str) -> None:
    known = tuple(known)
    if config.get(key) not in known:
        shown = _list(str(value) for value in known if value is not None)
        raise ModelError(f"{where}: {key} {config.get(key)!r} is not supported; supported: {shown}")


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)
