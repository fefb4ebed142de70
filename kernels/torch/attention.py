"""Paged attention in PyTorch, with float32 scores: the reference of the other backends.

Shape suffixes as in `kernels.interface`; also L KV positions of a slice, P blocks of a slice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.interface import AttentionShape, Batch

# Scores are materialized, so long slices and large groups of decodes are processed in chunks of
# this many query rows and this many padded KV positions.
_CHUNK_ROWS = 256
_PADDED_POSITIONS = 32_768


@dataclass(slots=True)
class TorchKVLayer:
    """keys and values: (num_blocks, block_size, G, D)."""

    keys: torch.Tensor
    values: torch.Tensor


def attend(
    q_TND: torch.Tensor, batch: Batch, kv: TorchKVLayer, shape: AttentionShape
) -> torch.Tensor:
    """Causal attention of the whole hybrid batch -> (T, N * D)."""
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


def _attend_slice(
    q_TND: torch.Tensor,
    start: int,
    table_B: torch.Tensor,
    kv: TorchKVLayer,
    shape: AttentionShape,
) -> torch.Tensor:
    """One request's chunk against its own blocks; row t of q is at position start + t."""
    length = start + q_TND.shape[0]
    first = 0
    if shape.sliding_window is not None:  # blocks that no row of this chunk sees are not read
        if shape.chunked:
            seen = start // shape.sliding_window * shape.sliding_window
        else:
            seen = max(0, start - shape.sliding_window + 1)
        first = seen // kv.keys.shape[1] * kv.keys.shape[1]
    last_block = -(-length // kv.keys.shape[1])
    blocks = table_B[first // kv.keys.shape[1] : last_block].long()
    k_LGD = kv.keys[blocks].flatten(0, 1)[: length - first]
    v_LGD = kv.values[blocks].flatten(0, 1)[: length - first]
    q_position_T1 = torch.arange(start, length, device=q_TND.device)[:, None]
    k_position_L = torch.arange(first, length, device=q_TND.device)
    visible_TL = _visible(q_position_T1, k_position_L, shape)
    bias_SNTL = _biases(q_position_T1.T, k_position_L, shape)
    return _softmax_attention(
        q_TND[None], k_LGD[None], v_LGD[None], visible_TL[None], bias_SNTL, shape
    )[0]


def _attend_decodes(
    q_SND: torch.Tensor, rows: slice, batch: Batch, kv: TorchKVLayer, shape: AttentionShape
) -> torch.Tensor:
    """One token of each decoding request in `rows`, padded to the longest of them."""
    starts_S = batch.starts_S[rows].long()
    num_blocks = int(starts_S.max()) // kv.keys.shape[1] + 1
    blocks_SP = batch.block_tables_SB[rows, :num_blocks].long()
    k_SLGD = kv.keys[blocks_SP].flatten(1, 2)
    v_SLGD = kv.values[blocks_SP].flatten(1, 2)
    k_position_L = torch.arange(k_SLGD.shape[1], device=q_SND.device)
    visible_SL = _visible(starts_S[:, None], k_position_L, shape)
    bias_SNTL = _biases(starts_S[:, None], k_position_L, shape)
    attended = _softmax_attention(
        q_SND[:, None], k_SLGD, v_SLGD, visible_SL[:, None], bias_SNTL, shape
    )
    return attended[:, 0]


def _visible(
    q_position: torch.Tensor, k_position: torch.Tensor, shape: AttentionShape
) -> torch.Tensor:
    visible = k_position <= q_position
    if shape.sliding_window is not None and shape.chunked:
        visible &= k_position >= q_position // shape.sliding_window * shape.sliding_window
    elif shape.sliding_window is not None:
        visible &= k_position > q_position - shape.sliding_window
    return visible


def _biases(
    q_position_ST: torch.Tensor, k_position_L: torch.Tensor, shape: AttentionShape
) -> torch.Tensor | None:
    """ALiBi of every query and key, (S, N, T, L), or None. Keys past the table are invisible."""
    alibi_NP = shape.alibi_NP
    if alibi_NP is None:
        return None
    key_NL = alibi_NP[:, k_position_L.clamp(max=alibi_NP.shape[1] - 1)]
    own_SNT = alibi_NP[:, q_position_ST].transpose(0, 1)
    return key_NL[:, None] - own_SNT[..., None]


def _softmax_attention(
    q_STND: torch.Tensor,
    k_SLGD: torch.Tensor,
    v_SLGD: torch.Tensor,
    visible_STL: torch.Tensor,
    bias_SNTL: torch.Tensor | None,
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
    if bias_SNTL is not None:
        scores_SGRTL += bias_SNTL.reshape(-1, *scores_SGRTL.shape[1:])
    scores_SGRTL.masked_fill_(~visible_STL[:, None, None], float("-inf"))
    # Slots past a request's end may hold stale NaN: a zero weight must contribute zero.
    v_SLGD = v_SLGD.float().masked_fill(~visible_STL.any(1)[:, :, None, None], 0.0)
    if shape.sinks_N is not None:
        sinks_GR11 = shape.sinks_N.view(shape.num_kv_heads, group, 1, 1)
        sinks_SGRT1 = sinks_GR11.expand(*scores_SGRTL.shape[:-1], 1)
        weights_SGRTL = torch.cat((scores_SGRTL, sinks_SGRT1), -1).softmax(-1)[..., :-1]
    else:
        weights_SGRTL = scores_SGRTL.softmax(-1)
    mixed = torch.einsum("sgrtl,slgd->stgrd", weights_SGRTL, v_SLGD)
    return mixed.flatten(2, 3).to(q_STND.dtype)
