"""Where each tensor of a model folder is in a GGUF file, and what a converter did to its values."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch

from actors.stage.models.config import DecoderConfig, LinearAttention
from actors.stage.models.names import Names
from actors.stage.weights.gguf_family import GgufFamily
from actors.stage.weights.names import all_shapes

Undo = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Place:
    """shape: of the folder's tensor. tensors: of the file, whose rows count one below another.
    expert: which of a tensor of all. rows, columns: for each of the folder's, where it is among
    these; None: in order. undo: of the values, in float32. heads: of latent attention, whose keys,
    turned over, and values are tensors of their own. height: rows of the file's tensor, where it
    holds others too; 0: as many as the folder's.
    """

    shape: tuple[int, ...]
    tensors: tuple[str, ...]
    expert: int | None = None
    rows: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    undo: Undo | None = None
    heads: int = 0
    height: int = 0

    def wanted(self, num_experts: int) -> tuple[int, ...]:
        shape = (self.height or self.shape[0], *self.shape[1:])
        return shape if self.expert is None else (num_experts, *shape)

    def order_of_blocks(self, features: int) -> torch.Tensor | None:
        """Of so many columns each; None where whole ones are not moved."""
        if self.columns is None or len(self.columns) % features:
            return None
        blocks, first = self.columns.view(-1, features), self.columns[::features]
        whole = torch.equal(blocks, first[:, None] + torch.arange(features))
        return first // features if whole and not (first % features).any() else None


def places(config: DecoderConfig, family: GgufFamily, stored: Collection[str]) -> dict[str, Place]:
    """By the folder's name. stored: names of the file's tensors."""
    # As files have them, gate and up of an expert or of an MLP are apart.
    kinds = tuple(replace(k, names=replace(k.names, stacked=None)) for k in config.kinds)
    config = replace(config, names=replace(config.names, stacked=None), kinds=kinds)
    ends, of_all = _ends(config.names), _Layer(config, family, stored)
    front, back = config.names.layer.split("{}")
    layers: dict[str, _Layer] = {}
    found = {}
    for name, shape in all_shapes(config).items():
        stem, _, ending = name.rpartition(".")
        if stem in ends:
            undo = _subtract_one if family.adds_one(name) else None
            found[name] = Place(shape, (f"{family.called(ends[stem])}.{ending}",), undo=undo)
            continue
        number, _, inside = name.removeprefix(front).partition(back)
        if config.kinds and number not in layers:
            layers[number] = _Layer(config.at(_number_of(config, int(number))), family, stored)
        of_layer = layers.get(number, of_all)
        found[name] = of_layer.place(f"blk.{number}.", inside, shape, family.adds_one(name))
    return found


def _ends(names: Names) -> dict[str, str]:
    """Of tensors that are not of a layer."""
    additions = names.additions
    ends = {
        names.embedding: "token_embd",
        names.embedding_norm: "token_embd_norm",
        names.positions: "position_embd",
        names.final_norm: "output_norm",
        names.head: "output",
        additions.inputs: "per_layer_token_embd",
        additions.inputs_projection: "per_layer_model_proj",
        additions.inputs_norm: "per_layer_proj_norm",
    }
    return {ours: theirs for ours, theirs in ends.items() if ours is not None}


class _Layer:
    """Places of the tensors of layers of one kind."""

    def __init__(self, config: DecoderConfig, family: GgufFamily, stored: Collection[str]) -> None:
        self._config, self._family, self._stored = config, family, stored
        names = config.names
        self._wholes, self._stems = _wholes(names), _in_a_layer(names)
        self._front, self._back = names.expert.split("{}")
        pairs = {names.expert_gate: "gate", names.expert_up: "up", names.expert_down: "down"}
        self._of_expert = pairs if config.num_experts else {}

    def place(self, prefix: str, inside: str, shape: tuple[int, ...], adds_one: bool) -> Place:
        """prefix: of the layer, in the file. inside: the folder's name, within the layer."""
        config, names = self._config, self._config.names
        stem, _, ending = inside.rpartition(".")
        number, _, which = stem.removeprefix(self._front).partition(self._back)
        if which in self._of_expert and stem.startswith(self._front) and number.isdigit():
            return self._expert(prefix, int(number), self._of_expert[which], ending, shape)
        apart = (f"{prefix}attn_k_b.weight", f"{prefix}attn_v_b.weight")
        if inside == f"{names.latent.up}.weight" and apart[0] in self._stored:
            return Place(shape, apart, heads=config.num_heads)
        grouped = f"{prefix}ssm_in.weight"  # of older files, as in the folder
        if self._family.regrouped and stem == names.mixer.inputs and grouped in self._stored:
            return Place(shape, (grouped,))
        rows, columns = _orders(inside, config, self._family)
        fused = f"{prefix}attn_qkv.{ending}"
        if names.qkv is None and stem in (names.q, names.k, names.v) and fused in self._stored:
            begin, height = _within_qkv(stem, config)
            rows = begin + (torch.arange(shape[0]) if rows is None else rows)
            return Place(shape, (fused,), None, rows, height=height)
        if inside in self._wholes:
            undo = _log_of_negative if inside == names.mixer.decay_log else None
            return Place(shape, (prefix + self._wholes[inside],), None, rows, columns, undo)
        whole = tuple(prefix + self._family.whole(s, ending) for s in self._called(stem))
        return Place(shape, whole, None, rows, columns, _subtract_one if adds_one else None)

    def _expert(
        self, prefix: str, expert: int, which: str, ending: str, shape: tuple[int, ...]
    ) -> Place:
        both = f"{prefix}ffn_gate_up_exps.{ending}"
        if which != "down" and both in self._stored:
            rows = _half(shape[0], which == "up")
            return Place(shape, (both,), expert, rows, height=2 * shape[0])
        return Place(shape, (f"{prefix}ffn_{which}_exps.{ending}",), expert)

    def _called(self, stem: str) -> tuple[str, ...]:
        names, family = self._config.names, self._family
        if family.split_gate_up and stem == names.gate_up:
            return "ffn_gate", "ffn_up"
        if names.shared_gate_up and stem == f"{names.shared_expert}{names.shared_gate_up}":
            return "ffn_gate_shexp", "ffn_up_shexp"
        if family.regrouped and stem == names.mixer.inputs:
            return "attn_qkv", "attn_gate"
        return (family.called(self._stems[stem]),)


@functools.cache
def _half(rows: int, lower: bool) -> torch.Tensor:
    return torch.arange(rows) + rows * lower


def _number_of(config: DecoderConfig, stored: int) -> int:
    """The layer that has a part of this number."""
    if not config.stored_at:
        return stored
    return next(layer for layer, places in enumerate(config.stored_at) if stored in places)


def _wholes(names: Names) -> dict[str, str]:
    """Of tensors whose names in a folder have no ending."""
    mixer, more = names.mixer, names.additions
    wholes = {
        mixer.decay_log: "ssm_a",
        mixer.step_bias: "ssm_dt.bias",
        mixer.skip: "ssm_d",
        more.scalar: "layer_output_scale.weight",
        more.router_scale: "ffn_gate_inp.scale",
        more.expert_scales: "ffn_down_exps.scale",
    }
    optional = {names.sinks: "attn_sinks.weight", names.correction_bias: "exp_probs_b.bias"}
    return wholes | {ours: theirs for ours, theirs in optional.items() if ours is not None}


def _in_a_layer(names: Names) -> dict[str, str]:
    mixer, more, shared = names.mixer, names.additions, names.shared_expert or ""
    inputs = "attn_qkv" if mixer.z else "ssm_in"
    pairs = {
        names.latent.query_down: "attn_q_a",
        names.latent.query_norm: "attn_q_a_norm",
        names.latent.query_up: "attn_q_b",
        names.latent.down: "attn_kv_a_mqa",
        names.latent.norm: "attn_kv_a_norm",
        names.latent.up: "attn_kv_b",
        more.input_gate: "inp_gate",
        more.input_projection: "proj",
        more.input_norm: "post_norm",
        more.mlp_norm: "post_ffw_norm_1",
        more.experts_norm: "post_ffw_norm_2",
        more.experts_input_norm: "pre_ffw_norm_2",
        names.mlp_norm: "ffn_norm",
        names.input_norm: "attn_norm",
        names.attention_out_norm: "post_attention_norm",
        names.mlp_out_norm: "post_ffw_norm",
        names.out: "attn_output",
        names.q_norm: "attn_q_norm",
        names.k_norm: "attn_k_norm",
        names.down: "ffn_down",
        names.router: "ffn_gate_inp",
        names.gate: "ffn_gate",
        names.up: "ffn_up",
        names.gate_up: "ffn_up",
        names.qkv: "attn_qkv",
        mixer.inputs: inputs,
        mixer.z: "attn_gate",
        mixer.rates: "ssm_beta" if mixer.decays else "ssm_ba",
        mixer.decays: "ssm_alpha",
        mixer.conv: "ssm_conv1d",
        mixer.norm: "ssm_norm",
        mixer.out: "ssm_out",
    }
    if shared:
        pairs |= {
            f"{shared}{names.expert_gate}": "ffn_gate_shexp",
            f"{shared}{names.expert_up}": "ffn_up_shexp",
            f"{shared}{names.shared_down or names.expert_down}": "ffn_down_shexp",
            names.shared_gate: "ffn_gate_inp_shexp",
        }
    if names.input_norm == "ln_attn":  # Falcon's, beside one of the MLP
        pairs |= {names.input_norm: "attn_norm_2", names.mlp_norm: "attn_norm"}
    if names.qkv is None:
        pairs |= {names.q: "attn_q", names.v: "attn_v", names.k: "attn_k"}  # v may be k
    return {ours: theirs for ours, theirs in pairs.items() if ours is not None}


def _orders(
    inside: str, config: DecoderConfig, family: GgufFamily
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Of the rows and the columns of a tensor, where a converter moves them."""
    names, (stem, _, ending) = config.names, inside.rpartition(".")
    permuted = family.permuted and (ending == "weight" or family.biases_permuted)
    if permuted and stem in (names.q, names.k):
        heads, size = config.num_heads if stem == names.q else config.num_kv_heads, config.head_dim
        halves = torch.arange(heads * size).view(heads, size // 2, 2).transpose(1, 2)
        return halves.flatten(), None
    if names.grouped and stem == names.qkv:
        return _by_group(config), None
    mixer = config.mixer
    if not isinstance(mixer, LinearAttention):
        return None, None
    if family.regrouped:
        return (_grouped(mixer), None) if stem == names.mixer.inputs else (None, None)
    one, wide = _tiled(mixer, 1), _tiled(mixer, mixer.value_dim)
    below = torch.cat([torch.arange(2 * mixer.key_size), 2 * mixer.key_size + wide])
    if stem == names.mixer.out:
        return None, wide
    rows = {names.mixer.inputs: below, names.mixer.conv: below, names.mixer.z: wide}
    rows |= dict.fromkeys((names.mixer.rates, names.mixer.decays), one)
    if inside in (names.mixer.decay_log, names.mixer.step_bias):
        return one, None
    return rows.get(stem), None


def _within_qkv(stem: str, config: DecoderConfig) -> tuple[int, int]:
    """Where a projection begins among all queries, keys and values, and the number of these."""
    names, keys = config.names, config.num_kv_heads * config.head_dim
    queries = config.num_heads * config.head_dim
    begins = {names.q: 0, names.k: queries, names.v: queries + keys}
    return begins[stem], queries + 2 * keys


def _by_group(config: DecoderConfig) -> torch.Tensor:
    """Files have all queries, keys and values below another, folders those of each key head."""
    keys = config.num_kv_heads * config.head_dim
    sizes = [config.num_heads * config.head_dim, keys, keys]
    parts = torch.split(torch.arange(sum(sizes)), sizes)
    return torch.cat([part.view(config.num_kv_heads, -1) for part in parts], dim=1).flatten()


def _tiled(mixer: LinearAttention, width: int) -> torch.Tensor:
    """Value heads lie by their number within a key's group in a file, by the group in a folder."""
    keys, each = mixer.num_key_heads, mixer.values_per_key
    return torch.arange(keys * each * width).view(each, keys, width).transpose(0, 1).flatten()


def _grouped(mixer: LinearAttention) -> torch.Tensor:
    """All queries, keys, values and gates, one below another, of rows grouped by key head."""
    keys, values = mixer.key_size, mixer.value_size
    parts = torch.split(torch.arange(2 * keys + 2 * values), [keys, keys, values, values])
    return torch.cat([part.view(mixer.num_key_heads, -1) for part in parts], dim=1).flatten()


def unused(config: DecoderConfig) -> set[str]:
    """Tensors of keys and values in layers that attend to those of others."""
    return {
        f"blk.{layer}.attn_{which}.weight"
        for layer, kind in enumerate(config.kinds)
        if kind.names.k is None
        for which in ("k", "v", "k_norm")
    }


def fits(found: tuple[int, ...], place: Place, num_experts: int, height: int) -> bool:
    """Whether a tensor of the file, of this shape, may be what a place says. height: rows of all
    its tensors together."""
    wanted = place.wanted(num_experts)
    if place.heads:
        return len(found) == 3 and found[0] == place.heads and wanted[1] in found[1:]
    if place.expert is not None:
        return found == wanted
    if len(wanted) == 1:
        return math.prod(found) == wanted[0]
    return height == wanted[0] and found[-1] == wanted[-1]


def _subtract_one(weight: torch.Tensor) -> torch.Tensor:
    return weight - 1


def _log_of_negative(decay: torch.Tensor) -> torch.Tensor:
    return (-decay).log()
