"""Tensor names in a family's checkpoints, without the ending `.weight` or `.bias`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StackedNames:
    """All experts of a layer in two tensors, named whole, read by `weights/stacked.py`.

    as_inputs: stored as (expert, in, out) features, else as (expert, out, in). alternates: rows of
    gate and up alternate, else all of gate is above all of up. quant_methods: of quantized folders.
    """

    gate_up: str
    down: str
    as_inputs: bool = False
    alternates: bool = False
    quant_methods: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LatentNames:
    """Of latent attention: down to the latents (keys' and values' with the shared key), their
    norms, and up from them. Queries without a latent have `Names.q`."""

    query_down: str = "self_attn.q_a_proj"
    query_norm: str = "self_attn.q_a_layernorm"
    query_up: str = "self_attn.q_b_proj"
    down: str = "self_attn.kv_a_proj_with_mqa"
    norm: str = "self_attn.kv_a_layernorm"
    up: str = "self_attn.kv_b_proj"


@dataclass(frozen=True, slots=True)
class MixerNames:
    """Of layers with a state in place of attention.

    inputs: of linear attention, grouped by key head: queries, keys, values and gates of results; or
    queries, keys and values, with the gates in `z`. Of a short convolution, its two gates and its
    input. Of Mamba-2, gates, values, keys, queries and steps. rates, decays: of the recurrence, or
    both in `rates`, grouped by key head. decay_log, step_bias, skip: named whole. norm: of results.
    """

    inputs: str = "linear_attn.in_proj_qkvz"
    z: str | None = None
    rates: str = "linear_attn.in_proj_ba"
    decays: str | None = None
    conv: str = "linear_attn.conv1d"
    decay_log: str = "linear_attn.A_log"
    step_bias: str = "linear_attn.dt_bias"
    skip: str = "mamba.D"
    norm: str = "linear_attn.norm"
    out: str = "linear_attn.out_proj"


MAMBA = MixerNames(
    inputs="mamba.in_proj",
    conv="mamba.conv1d",
    decay_log="mamba.A_log",
    step_bias="mamba.dt_bias",
    norm="mamba.norm",
    out="mamba.out_proj",
)


@dataclass(frozen=True, slots=True)
class AdditionNames:
    """Of what only Gemma 4 has. Of all layers: the table and projection of their inputs, and its
    norm. Of a layer: its input's gate, projection and norm; its scalar; of experts beside an MLP,
    the norms of both results, of the experts' input, and the scales of the router's input and of
    the experts' weights. Those without an ending are named whole."""

    inputs: str = "model.embed_tokens_per_layer"
    inputs_projection: str = "model.per_layer_model_projection"
    inputs_norm: str = "model.per_layer_projection_norm"
    input_gate: str = "per_layer_input_gate"
    input_projection: str = "per_layer_projection"
    input_norm: str = "post_per_layer_input_norm"
    scalar: str = "layer_scalar"
    mlp_norm: str = "post_feedforward_layernorm_1"
    experts_norm: str = "post_feedforward_layernorm_2"
    experts_input_norm: str = "pre_feedforward_layernorm_2"
    router_scale: str = "router.scale"
    expert_scales: str = "router.per_expert_scale"


@dataclass(frozen=True, slots=True)
class Names:
    """Tensor names; the defaults are Llama's. Names of a layer follow the prefix `layer`.

    The names determine a layer's parts: a norm without a name does not exist, and an MLP without
    `gate` and `gate_up` has no gate, nor have experts, which then lack `expert_gate`.

    embedding_norm: of the embedding.
    input_norm, mlp_norm: before attention and before the MLP. attention_out_norm, mlp_out_norm:
    of their results, before the addition to the residual.
    q, k, v: k and v may be one tensor; without k, the layer has only queries.
    qkv: all three in one tensor, `grouped` by key/value head (its query heads, its key, its value)
    or all queries, all keys, all values. gate_up: gate above up.
    latent: in place of k and v, for latent attention.
    mixer: of layers without attention.
    sinks: an additional attention score of each head.
    expert: prefix of the three names of each expert of a mixture, which `stacked` tensors hold
    together. shared_expert: the same of one that every token has, but with its own `shared_down`
    and, gate above up, `shared_gate_up` where these are named. shared_gate: one row, which scales
    it. correction_bias: of the router's scores, named whole; correction_bias_row: of shape
    (1, experts).
    transposed: linear layers are stored as (in, out) features.
    stored_prefixes: prefixes of stored names, and what they are here; None: tensors of a part that
    is not read.
    """

    embedding: str = "model.embed_tokens"
    positions: str | None = None
    embedding_norm: str | None = None
    final_norm: str = "model.norm"
    head: str = "lm_head"
    layer: str = "model.layers.{}."
    input_norm: str | None = "input_layernorm"
    attention_out_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_out_norm: str | None = None
    q: str = "self_attn.q_proj"
    k: str | None = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    qkv: str | None = None
    grouped: bool = False
    latent: LatentNames = LatentNames()
    mixer: MixerNames = MixerNames()
    additions: AdditionNames = AdditionNames()
    out: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str | None = None
    gate: str | None = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    gate_up: str | None = None
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    expert: str = "mlp.experts.{}."
    shared_expert: str | None = None
    shared_gate_up: str | None = None
    shared_down: str | None = None
    shared_gate: str | None = None
    correction_bias: str | None = None
    correction_bias_row: bool = False
    expert_gate: str | None = "gate_proj"
    expert_up: str = "up_proj"
    expert_down: str = "down_proj"
    stacked: StackedNames | None = None
    transposed: bool = False
    stored_prefixes: tuple[tuple[str, str | None], ...] = ()

    @property
    def optional_prefix(self) -> str:
        """Prefix of all names but the head's, which checkpoints of a model without a head omit."""
        return self.embedding.partition(".")[0] + "."

    @property
    def expert_inputs(self) -> list[str]:
        return [name for name in (self.expert_gate, self.expert_up) if name is not None]

    @property
    def gated(self) -> bool:
        return self.gate is not None or self.gate_up is not None


LLAMA = Names()


def of_images(*parts: str) -> tuple[tuple[str, str | None], ...]:
    """Prefixes of stored names, as published and as transformers holds them since 2025. parts: what
    is not read."""
    left_out = [(f"{outer}{part}.", None) for part in parts for outer in ("", "model.")]
    return (
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
        ("model.language_model.", "model."),
        *left_out,
    )
