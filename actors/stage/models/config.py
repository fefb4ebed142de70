"""The description of a decoder, read from a Hugging Face `config.json`.

One frozen description covers every family: families differ in a few orthogonal choices (norms,
biases, rotation, activation, windows, scalings), which `families_*.py` read from the file. The file
is read as plain JSON, so no code in a model folder is executed.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

from actors.stage.models.alibi import Alibi
from actors.stage.models.keys import JsonObject
from actors.stage.models.names import LLAMA, Names
from actors.stage.models.rope import Rope
from kernels.layer_form import BY_SOFTMAX, Routing

# Link to the GGUF file in a folder made from one.
GGUF_LINK = "model.gguf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, 2024): keys and values of all heads are products of
    one latent vector a token, beside one rotated key that they share.

    rank: of the latent. query_rank: of the queries', which are products of a latent too; 0: of the
    hidden state. plain_dim, rotated_dim: of a head's query and key, in this order. value_dim: of a
    head's value. norm_eps: of the norms of both latents.
    """

    rank: int
    query_rank: int
    plain_dim: int
    rotated_dim: int
    value_dim: int
    norm_eps: float = 1e-6

    @property
    def query_dim(self) -> int:
        return self.plain_dim + self.rotated_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """Layers of a gated delta rule (`kernels.recurrence.Recurrence`): a convolution of `taps`
    tokens over queries, keys and values, then a recurrence, whose results are normed by head and
    gated."""

    taps: int
    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int

    @property
    def values_per_key(self) -> int:
        return self.num_heads // self.num_key_heads

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.num_heads * self.value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2:
    """Layers of Mamba-2 (Dao and Gu, 2024): a convolution of `taps` tokens, then a recurrence whose
    keys and queries, of state_dim features, are those of a group of heads. Results are gated, then
    normed by group.

    step_limits: of the length of a step. bias: of both projections; conv_bias: of the convolution.
    normed: with norm_eps; else results are gated alone.
    """

    taps: int
    num_groups: int
    num_heads: int
    state_dim: int
    head_dim: int
    normed: bool = True
    norm_eps: float
    step_limits: tuple[float, float] = (0.0, math.inf)
    bias: bool = False
    conv_bias: bool = True

    @property
    def key_size(self) -> int:
        return self.num_groups * self.state_dim

    @property
    def value_size(self) -> int:
        return self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConv:
    """Layers of a gated convolution of `taps` tokens (LFM2). bias: of all its tensors."""

    taps: int
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """What one layer has of its own, where layers differ in more than experts and windows.

    names: of its tensors; without `k`, it has only queries. kv_source: the layer whose cached keys
    and values its queries attend to: itself, or one before it.
    """

    head_dim: int
    num_kv_heads: int
    inner_size: int
    names: Names
    kv_source: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Multipliers:
    """Of results of linear layers: of those after attention and its mixer, of a mixer's queries,
    keys, values, gates and steps, of an MLP's gate, and of an MLP."""

    attention: float
    mixer: float
    mixer_inputs: tuple[float, ...]
    gate: float
    mlp: float


class ModelError(ValueError):
    """A model folder that cannot be served; the message names the file and the cause."""


@dataclass(frozen=True, slots=True)
class Temperature:
    """A query at position p is multiplied by 1 + slope log(1 + floor((p + first) / length)), in the
    layers that are rotated or in the others."""

    slope: float
    length: int
    first: int
    rotated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes and choices of one decoder; lengths in tokens, windows as in `AttentionShape`. The
    choices default to Llama's.

    stored_at: of checkpoints that number attention (or mixer) and MLP apart, each with its norm:
    the numbers of both of each layer; None: it has no MLP. Empty: a layer is stored as one.
    ropes, sliding_windows: one entry per layer; window None: a token attends to all before it.
    chunked_windows: windows are chunks, as in `AttentionShape`.
    norm: "rms" or "layer" (mean removed; with a bias if norm_bias). norm_weights: stored, else 1.
    norm_offset: added to every norm's weight. wide_norms: weights count before norms are rounded.
    parallel: attention and MLP read the same hidden state, and their results are added.
    qk_norm: "none", "head" (each head by itself), "unit" (so, without weights, in layers that are
    rotated) or "whole" (all heads as one vector). norms_last: as in `AttentionShape`. value_norm:
    each head of the values too, without weights.
    temperature: of queries, or None.
    learned_positions: added to the embedding; position 0 is row `position_offset` of the table.
    alibi: of all heads and layers, or None.
    attention_gate: q is stored with a gate of each head's result, which its sigmoid multiplies.
    mixer: what layers have in place of attention where `mixer_layers` says so; None: none have.
    mixer_beside: all have it, beside attention, to whose result its own is added.
    latent: of all layers, or None. Then num_kv_heads is 1 and head_dim what the cache holds: the
    rotated key with the latent.
    embedding_scale, logit_scale: factors of the embedding (rounded to the model's type if
    rounds_embedding_scale) and of the logits, then capped by softcap c: c * tanh(logits / c).
    expert_layers: whether a layer's MLP is a mixture of num_experts of inner size expert_size.
    normalizes_expert_weights: a token's expert weights sum to 1. expert_bias: of the router too.
    routing: as in `Experts`, whose bias is `names.correction_bias`.
    wide_router: as in `Experts`.
    shared_expert_size: inner size of `names.shared_expert`, a `SharedExpert`.
    scales_expert_inputs: as in `Experts`; `names.shared_expert` is the last one and of their size.
    experts_beside: these layers have an MLP too, beside the experts, as in `models/additions.py`.
    layer_input_size: of the vector that each layer gets of each token; 0: none. layer_scalars: a
    layer's result is multiplied by a stored scalar.
    kinds: one entry per layer, or none where one layer's sizes are those of all.
    quantization_config: as in config.json, or None; quantization_key: its name there.
    """

    architecture: str
    names: Names = LLAMA
    stored_at: tuple[tuple[int, int | None], ...] = ()
    hidden_size: int
    inner_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm: str = "rms"
    norm_eps: float
    norm_bias: bool = False
    norm_weights: bool = True
    norm_offset: float = 0.0
    wide_norms: bool = False
    parallel: bool = False
    qk_norm: str = "none"
    norms_last: bool = False
    value_norm: bool = False
    activation: str = "silu"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    ropes: tuple[Rope, ...]
    sliding_windows: tuple[int | None, ...]
    chunked_windows: bool = False
    temperature: Temperature | None = None
    attention_scale: float
    attention_softcap: float | None = None
    alibi: Alibi | None = None
    latent: Latent | None = None
    attention_gate: bool = False
    mixer: LinearAttention | Mamba2 | ShortConv | None = None
    mixer_layers: tuple[bool, ...] = ()
    mixer_beside: bool = False
    multipliers: Multipliers | None = None
    position_offset: int = 0
    embedding_scale: float = 1.0
    rounds_embedding_scale: bool = False
    tied_embeddings: bool = False
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    normalizes_expert_weights: bool = False
    routing: Routing = BY_SOFTMAX
    wide_router: bool = False
    shared_expert_size: int = 0
    scales_expert_inputs: bool = False
    expert_bias: bool = False
    expert_layers: tuple[bool, ...] = ()
    experts_beside: bool = False
    layer_input_size: int = 0
    layer_scalars: bool = False
    kinds: tuple[LayerKind, ...] = ()
    dtype: str = "float32"
    eos_token_ids: tuple[int, ...] = ()
    quantization_config: JsonObject | None = None
    quantization_key: str = "quantization_config"

    def has_mlp(self, layer: int) -> bool:
        """Or experts."""
        return not self.stored_at or self.stored_at[layer][1] is not None

    def has_experts(self, layer: int) -> bool:
        return self.num_experts > 0 and self.expert_layers[layer]

    def has_mixer(self, layer: int) -> bool:
        """In place of attention."""
        return self.mixer is not None and not self.mixer_beside and self.mixer_layers[layer]

    def at(self, layer: int) -> DecoderConfig:
        """A model whose layers all have the sizes and names of this one."""
        if not self.kinds:
            return self
        kind = self.kinds[layer]
        return replace(
            self,
            names=kind.names,
            head_dim=kind.head_dim,
            num_kv_heads=kind.num_kv_heads,
            inner_size=kind.inner_size,
            ropes=(self.ropes[layer],) * self.num_layers,
            kinds=(),
        )

    @property
    def widest_head(self) -> int:
        return max((kind.head_dim for kind in self.kinds), default=self.head_dim)

    @property
    def activation_width(self) -> int:
        """Numbers that a step holds of a token at once, about."""
        inner = max((kind.inner_size for kind in self.kinds), default=self.inner_size)
        return 2 * inner + 6 * self.hidden_size + 4 * self.num_layers * self.layer_input_size

    @property
    def attention_window(self) -> int:
        """Positions that a token sees at most in every layer, 0 where layers have no common one."""
        first, *others = set(self.sliding_windows)
        return first if first and not others and not self.chunked_windows else 0

    @property
    def max_model_len(self) -> int:
        """Longest sequence that the model's positions cover, in tokens."""
        return min((rope.reach for rope in self.ropes if rope.dim), default=self.max_positions)


def read_json(path: Path) -> JsonObject:
    """The object in a file. Raises ModelError naming the file if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except (OSError, ValueError) as bad:
        raise ModelError(f"{path} is not readable JSON: {bad}") from bad
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value
