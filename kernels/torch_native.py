"""Backend "torch": every operation in plain PyTorch, any device, float32, bfloat16 or float16.

It is the reference of the others: written to be read, correct for every shape, and fast enough
for tests. Arithmetic that rounds badly (norms, softmax, rotation) runs in float32.

Shape suffixes as in `kernels.interface`; also L kv positions of a slice, P kv block positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.interface import AttentionShape, Batch, KVLayer, LayerWeights, Linear

# Scores are materialised, so long slices and wide decode groups are taken in pieces: this many
# query rows, this many padded kv positions at a time.
_CHUNK_ROWS = 256
_PADDED_POSITIONS = 32_768


@dataclass(slots=True)
class PlainLinear:
    """A dense weight; a quantised one is held dense, rounded to its grid."""

    weight_OK: torch.Tensor
    bias_O: torch.Tensor | None
    in_features: int
    out_features: int

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        return functional.linear(x_TK, self.weight_OK, self.bias_O)


@dataclass(slots=True)
class PlainKVLayer:
    """keys and values: (num_blocks, block_size, G, D)."""

    keys: torch.Tensor
    values: torch.Tensor


class PlainBackend:
    """Plain torch; see the module docstring."""

    name = "torch"

    def pack_linear(
        self, weight_OK: torch.Tensor, bias_O: torch.Tensor | None, quantization: str = "none"
    ) -> Linear:
        if quantization != "none":
            weight_OK = round_to_groups(weight_OK, quantization)
        out_features, in_features = weight_OK.shape
        return PlainLinear(weight_OK.contiguous(), bias_O, in_features, out_features)

    def rms_norm(self, x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
        wide_TH = x_TH.float()
        scale_T1 = torch.rsqrt(wide_TH.square().mean(-1, keepdim=True) + eps)
        return weight_H * (wide_TH * scale_T1).to(x_TH.dtype)

    def add_rms_norm(
        self, x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
    ) -> torch.Tensor:
        residual_TH += x_TH
        return self.rms_norm(residual_TH, weight_H, eps)

    def silu_mul(self, gate_up_T2I: torch.Tensor) -> torch.Tensor:
        gate_TI, up_TI = gate_up_T2I.chunk(2, dim=-1)
        return functional.silu(gate_TI) * up_TI

    def allocate_kv(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        shape: AttentionShape,
        dtype: torch.dtype,
        device: torch.device,
    ) -> list[KVLayer]:
        size = (num_blocks, block_size, shape.num_kv_heads, shape.head_dim)
        return [
            PlainKVLayer(
                torch.zeros(size, dtype=dtype, device=device),
                torch.zeros(size, dtype=dtype, device=device),
            )
            for _ in range(num_layers)
        ]

    def kv_block_bytes(self, block_size: int, shape: AttentionShape, dtype: torch.dtype) -> int:
        return 2 * block_size * shape.num_kv_heads * shape.head_dim * dtype.itemsize

    def copy_blocks(self, layers: Sequence[KVLayer], pairs: Sequence[tuple[int, int]]) -> None:
        for layer in layers:
            kv = _plain(layer)
            for source, destination in pairs:  # in order: a later pair may read an earlier one's
                kv.keys[destination] = kv.keys[source]
                kv.values[destination] = kv.values[source]

    def read_block(self, layer: KVLayer, block: int) -> torch.Tensor:
        kv = _plain(layer)
        return torch.stack((kv.keys[block], kv.values[block])).cpu()

    def write_block(self, layer: KVLayer, block: int, data: torch.Tensor) -> None:
        kv = _plain(layer)
        kv.keys[block].copy_(data[0])
        kv.values[block].copy_(data[1])

    def rope_and_cache(
        self,
        qkv_TX: torch.Tensor,
        cos_sin_PD: torch.Tensor,
        batch: Batch,
        layer: KVLayer,
        shape: AttentionShape,
        q_norm_D: torch.Tensor | None = None,
        k_norm_D: torch.Tensor | None = None,
        eps: float = 1e-6,
    ) -> torch.Tensor:
        kv = _plain(layer)
        num_tokens, heads, kv_heads = qkv_TX.shape[0], shape.num_heads, shape.num_kv_heads
        qkv_THD = qkv_TX.view(num_tokens, heads + 2 * kv_heads, shape.head_dim)
        q_TND, k_TGD, v_TGD = torch.split(qkv_THD, [heads, kv_heads, kv_heads], dim=1)
        if q_norm_D is not None:
            q_TND = self.rms_norm(q_TND, q_norm_D, eps)
        if k_norm_D is not None:
            k_TGD = self.rms_norm(k_TGD, k_norm_D, eps)
        cos_sin_T1D = cos_sin_PD[batch.positions_T.long()].unsqueeze(1)
        slots_T = batch.slot_mapping_T.long()
        kv.keys.flatten(0, 1)[slots_T] = _rotate(k_TGD, cos_sin_T1D).to(kv.keys.dtype)
        kv.values.flatten(0, 1)[slots_T] = v_TGD.to(kv.values.dtype)
        return _rotate(q_TND, cos_sin_T1D).contiguous()

    def attention(
        self, q_TND: torch.Tensor, batch: Batch, layer: KVLayer, shape: AttentionShape
    ) -> torch.Tensor:
        kv = _plain(layer)
        out_TND = torch.empty_like(q_TND)
        decodes = batch.num_decodes
        group = max(1, _PADDED_POSITIONS // max(1, batch.max_kv_length))
        for first in range(0, decodes, group):
            rows = slice(first, min(first + group, decodes))
            out_TND[rows] = _attend_decodes(q_TND[rows], rows, batch, kv, shape)
        starts = batch.starts_S[decodes:].tolist()
        lengths = batch.lengths_S[decodes:].tolist()
        offset = decodes
        for s, (start, length) in enumerate(zip(starts, lengths, strict=True), start=decodes):
            for done in range(0, length, _CHUNK_ROWS):
                rows = slice(offset + done, offset + min(done + _CHUNK_ROWS, length))
                table_B = batch.block_tables_SB[s]
                out_TND[rows] = _attend_slice(q_TND[rows], start + done, table_B, kv, shape)
            offset += length
        return out_TND.flatten(1)

    def decoder_stack(
        self,
        layers: Sequence[LayerWeights],
        kv: Sequence[KVLayer],
        cos_sin_PD: torch.Tensor,
        shape: AttentionShape,
        eps: float,
    ) -> None:
        return None


def round_to_groups(weight_OK: torch.Tensor, quantization: str, group: int = 128) -> torch.Tensor:
    """Round each group of input features to a symmetric int8 or int4 grid of its own scale."""
    if quantization not in ("int8", "int4"):
        raise ValueError(f"quantization {quantization!r} is unknown; known: none, int8, int4")
    highest = 127 if quantization == "int8" else 7
    rows, columns = weight_OK.shape
    padded_OK = functional.pad(weight_OK.float(), (0, -columns % group))
    grouped_OGK = padded_OK.view(rows, -1, group)
    scale_OG1 = grouped_OGK.abs().amax(-1, keepdim=True).clamp(min=1e-12) / highest
    rounded_OGK = (grouped_OGK / scale_OG1).round().clamp(-highest - 1, highest) * scale_OG1
    return rounded_OGK.view(rows, -1)[:, :columns].to(weight_OK.dtype)


def _plain(layer: KVLayer) -> PlainKVLayer:
    if not isinstance(layer, PlainKVLayer):
        raise TypeError(f"the torch backend was given a cache of {type(layer).__name__}")
    return layer


def _rotate(x_TND: torch.Tensor, cos_sin_T1D: torch.Tensor) -> torch.Tensor:
    """Rotate feature pairs (i, i + D/2) by the position's angles, in float32."""
    cos, sin = cos_sin_T1D.chunk(2, dim=-1)
    first, second = x_TND.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x_TND.dtype)


def _attend_slice(
    q_TND: torch.Tensor,
    start: int,
    table_B: torch.Tensor,
    kv: PlainKVLayer,
    shape: AttentionShape,
) -> torch.Tensor:
    """One request's chunk against its own blocks; q row t stands at position start + t."""
    length = start + q_TND.shape[0]
    first = 0
    if shape.sliding_window is not None:  # blocks no row of this chunk can see are not read
        first = max(0, start - shape.sliding_window + 1) // kv.keys.shape[1] * kv.keys.shape[1]
    last_block = -(-length // kv.keys.shape[1])
    blocks = table_B[first // kv.keys.shape[1] : last_block].long()
    k_LGD = kv.keys[blocks].flatten(0, 1)[: length - first]
    v_LGD = kv.values[blocks].flatten(0, 1)[: length - first]
    q_position_T1 = torch.arange(start, length, device=q_TND.device)[:, None]
    k_position_L = torch.arange(first, length, device=q_TND.device)
    visible_TL = _visible(q_position_T1, k_position_L, shape)
    return _softmax_attention(q_TND[None], k_LGD[None], v_LGD[None], visible_TL[None], shape)[0]


def _attend_decodes(
    q_SND: torch.Tensor, rows: slice, batch: Batch, kv: PlainKVLayer, shape: AttentionShape
) -> torch.Tensor:
    """One token of each decoding request in `rows`, padded to the longest of them."""
    starts_S = batch.starts_S[rows].long()
    num_blocks = int(starts_S.max()) // kv.keys.shape[1] + 1
    blocks_SP = batch.block_tables_SB[rows, :num_blocks].long()
    k_SLGD = kv.keys[blocks_SP].flatten(1, 2)
    v_SLGD = kv.values[blocks_SP].flatten(1, 2)
    k_position_L = torch.arange(k_SLGD.shape[1], device=q_SND.device)
    visible_SL = _visible(starts_S[:, None], k_position_L, shape)
    attended = _softmax_attention(q_SND[:, None], k_SLGD, v_SLGD, visible_SL[:, None], shape)
    return attended[:, 0]


def _visible(
    q_position: torch.Tensor, k_position: torch.Tensor, shape: AttentionShape
) -> torch.Tensor:
    visible = k_position <= q_position
    if shape.sliding_window is not None:
        visible &= k_position > q_position - shape.sliding_window
    return visible


def _softmax_attention(
    q_STND: torch.Tensor,
    k_SLGD: torch.Tensor,
    v_SLGD: torch.Tensor,
    visible_STL: torch.Tensor,
    shape: AttentionShape,
) -> torch.Tensor:
    """Grouped-query attention with float32 scores -> (S, T, N, D) in q's dtype."""
    group = shape.num_heads // shape.num_kv_heads
    slices, rows = q_STND.shape[:2]
    grouped = (slices, rows, shape.num_kv_heads, group, shape.head_dim)
    q_STGRD = q_STND.float().reshape(grouped)
    scores_SGRTL = torch.einsum("stgrd,slgd->sgrtl", q_STGRD, k_SLGD.float()) * shape.scale
    if shape.softcap is not None:
        scores_SGRTL = shape.softcap * torch.tanh(scores_SGRTL / shape.softcap)
    scores_SGRTL.masked_fill_(~visible_STL[:, None, None], float("-inf"))
    # Blocks behind a request's end may hold anything, NaN included: zero weight must mean zero.
    v_SLGD = v_SLGD.float().masked_fill(~visible_STL.any(1)[:, :, None, None], 0.0)
    mixed = torch.einsum("sgrtl,slgd->stgrd", scores_SGRTL.softmax(-1), v_SLGD)
    return mixed.flatten(2, 3).to(q_STND.dtype)
