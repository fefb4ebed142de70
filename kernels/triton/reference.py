"""References of every GPU kernel, in float64 and plain torch.

Written for clarity, not speed: one loop over requests. Tests and `legato bench gpu` compare with
them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kernels.adapters import AdapterModule
from kernels.interface import AttentionShape, Batch
from kernels.layer_form import LayerForm
from kernels.packing import PackedWeight
from kernels.recurrence import Recurrence
from kernels.torch.backend import TorchBackend
from kernels.triton.cache import FLOAT8, PagedKV
from kernels.triton.grouped import GroupedLinear


def rms_norm(x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    x = x_TH.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight_H.double()


def silu_mul(gate_up_T2I: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up_T2I.double().chunk(2, -1)
    return gate / (1 + torch.exp(-gate)) * up


def rotate(x_THD: torch.Tensor, cos_sin_TD: torch.Tensor) -> torch.Tensor:
    cos, sin = cos_sin_TD.double()[:, None].chunk(2, -1)
    first, second = x_THD.double().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def rope(
    qkv_TX: torch.Tensor,
    cos_sin_PD: torch.Tensor,
    batch: Batch,
    shape: AttentionShape,
    q_norm_D: torch.Tensor | None,
    k_norm_D: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q, k, v), normed and rotated, each (T, heads, D)."""
    heads = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
    qkv_THD = qkv_TX.double().view(-1, sum(heads), shape.head_dim)
    q, k, v = torch.split(qkv_THD, heads, dim=1)
    table = cos_sin_PD[batch.positions_T.long()]

    def turned(x: torch.Tensor, norm_D: torch.Tensor | None) -> torch.Tensor:
        if norm_D is None:
            return rotate(x, table)
        if shape.norms_last:
            return rms_norm(rotate(x, table), norm_D, eps)
        return rotate(rms_norm(x, norm_D, eps), table)

    return turned(q, q_norm_D), turned(k, k_norm_D), v


def cached(stored: torch.Tensor, scale: float) -> torch.Tensor:
    """Values of a cache tensor in float64: dequantized and scaled."""
    values = stored.view(FLOAT8) if stored.dtype == torch.uint8 else stored
    return values.to(torch.float64) * scale


def cached_pair(cache: PagedKV) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as float64 (slots, G, D), copied."""
    return (
        cached(cache.keys, cache.k_scale).flatten(0, 1).clone(),
        cached(cache.values, cache.v_scale).flatten(0, 1).clone(),
    )


def attention(
    q_TND: torch.Tensor, batch: Batch, layer: PagedKV, shape: AttentionShape
) -> torch.Tensor:
    """(T, N * D); rows that belong to no slice are 0."""
    out = torch.zeros(q_TND.shape, dtype=torch.float64, device=q_TND.device)
    group = shape.num_heads // shape.num_kv_heads
    keys, values = cached(layer.keys, layer.k_scale), cached(layer.values, layer.v_scale)
    for s in range(batch.starts_S.shape[0]):
        start, length = int(batch.starts_S[s]), int(batch.lengths_S[s])
        first = int(batch.query_starts_S1[s])
        num_blocks = -(-(start + length) // layer.block_size)
        blocks = batch.block_tables_SB[s, :num_blocks].long()
        k = keys[blocks].flatten(0, 1)[: start + length].repeat_interleave(group, 1)
        v = values[blocks].flatten(0, 1)[: start + length].repeat_interleave(group, 1)
        q = q_TND[first : first + length].double()
        score = torch.einsum("tnd,knd->ntk", q, k) * shape.scale
        if shape.softcap is not None:
            score = shape.softcap * torch.tanh(score / shape.softcap)
        if shape.alibi_NP is not None:
            bias = shape.alibi_NP[:, : start + length].double()
            score = score + bias[:, None] - bias[:, start:, None]
        q_position = torch.arange(start, start + length, device=q.device)[:, None]
        k_position = torch.arange(start + length, device=q.device)[None]
        sees = k_position <= q_position
        if shape.sliding_window is not None and shape.chunked:
            sees &= k_position // shape.sliding_window == q_position // shape.sliding_window
        elif shape.sliding_window is not None:
            sees &= k_position > q_position - shape.sliding_window
        score = score.masked_fill(~sees, -math.inf)
        if shape.sinks_N is not None:
            sinks_NT1 = shape.sinks_N.double()[:, None, None].expand(-1, length, 1)
            score = torch.cat((score, sinks_NT1), -1)
        weights = score.softmax(-1)[..., : start + length]
        out[first : first + length] = torch.einsum("ntk,knd->tnd", weights, v)
    return out.flatten(1)


def experts(
    x_TH: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    layers: tuple[GroupedLinear, GroupedLinear],
    form: LayerForm,
) -> torch.Tensor:
    """(T, H): each token's selected experts, summed by their weights."""
    out = torch.zeros(x_TH.shape, dtype=torch.float64, device=x_TH.device)
    for expert in range(len(layers[0].held)):
        token, k = (topk_ids_TK == expert).nonzero(as_tuple=True)
        wide = _linear(x_TH[token].double(), layers[0], expert)
        inner = TorchBackend().activate(wide, form.activation, form.gated)
        given = _linear(inner, layers[1], expert) * topk_weights_TK[token, k, None].double()
        out.index_add_(0, token, given)
    return out


def _linear(x_XK: torch.Tensor, layer: GroupedLinear, expert: int) -> torch.Tensor:
    held = layer.held[expert]
    weight_OK = held.dequantize(torch.float32) if isinstance(held, PackedWeight) else held
    y_XO = x_XK @ weight_OK.double().T
    return y_XO if layer.bias_EO is None else y_XO + layer.bias_EO[expert].double()


def adapters(
    module: AdapterModule, x_TK: torch.Tensor, y_TO: torch.Tensor, slots: Sequence[int]
) -> torch.Tensor:
    """(T, O): y and, for rows with a slot (not -1), B A x."""
    out = y_TO.double()
    for t, slot in enumerate(slots):
        if slot < 0:
            continue
        a_MRK, b_RO = module.a_CMRK[slot].double(), module.b_CRO[slot].double()
        b_parts = torch.split(b_RO, list(module.widths), dim=1)
        added = [(a @ x_TK[t].double()) @ b for a, b in zip(a_MRK, b_parts, strict=True)]
        out[t] += torch.cat(added)
    return out


def causal_conv(
    x_LC: torch.Tensor,
    weight_JC: torch.Tensor,
    bias_C: torch.Tensor | None,
    old_JC: torch.Tensor,
    silu: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One slice of L tokens: (L, C), and the state that it leaves, in x's type."""
    taps = len(weight_JC)
    inputs = torch.cat((old_JC, x_LC))
    y = torch.stack(
        [(inputs[t : t + taps].double() * weight_JC.double()).sum(0) for t in range(len(x_LC))]
    )
    if bias_C is not None:
        y = y + bias_C.double()
    return y / (1 + torch.exp(-y)) if silu else y, inputs[len(x_LC) :]


def recurrence(
    qkv_LC: torch.Tensor,
    decays_LN: torch.Tensor,
    rates_LN: torch.Tensor,
    old_NFD: torch.Tensor,
    form: Recurrence,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One slice of L tokens: (L, N * D), and the matrices that it leaves."""
    widths = [form.num_key_heads * form.key_dim] * 2 + [form.num_heads * form.value_dim]
    q_LX, k_LX, v_LX = torch.split(qkv_LC.double(), widths, 1)
    out, left = [], old_NFD.double().clone()
    for t in range(len(qkv_LC)):
        for n in range(form.num_heads):
            first = n * form.num_key_heads // form.num_heads * form.key_dim
            q, k = (x[t, first : first + form.key_dim] for x in (q_LX, k_LX))
            u = v_LX[t, n * form.value_dim : (n + 1) * form.value_dim]
            left[n] *= decays_LN[t, n].double()
            if form.delta:
                q, k = (x * torch.rsqrt(x.square().sum() + 1e-6) for x in (q, k))
                q = q / math.sqrt(form.key_dim)
                u = u - k @ left[n]
            left[n] += torch.outer(k, rates_LN[t, n].double() * u)
            out.append(q @ left[n])
    return torch.cat(out).view(len(qkv_LC), -1), left


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """||out - expected|| / ||expected||; infinity if any value is not finite."""
    difference = (out.double() - expected.double()).norm()
    error = float(difference / expected.double().norm().clamp(min=1e-30))
    return error if math.isfinite(error) else math.inf
