"""Loads the products of latent attention in the form in which the cache holds one key/value head.

A head's score of a key is q . (U l), with the token's latent l and the head's matrix U, and equals
(U' q) . l; its result, a weighted sum of V l, equals V times the sum of the latents. So queries are
taken into the space of the cache, and its sums out of it (DeepSeek-V2, 2024, appendix C).
"""

from __future__ import annotations

import torch

from actors.stage.models.config import DecoderConfig, Latent
from actors.stage.models.rope import feature_order
from actors.stage.weights.linears import LinearLoader
from actors.stage.weights.names import Piece, qkv_pieces
from actors.stage.weights.source import Shard
from kernels.layer_weights import LatentWeights


def load_latent(loader: LinearLoader, prefix: str) -> LatentWeights | None:
    """One layer's, of this rank's heads; None where attention is not latent. Products by head are
    never quantized."""
    config, latent = loader.config, loader.config.latent
    if latent is None:
        return None
    names, part = config.names.latent, loader.split
    first, end = (edge // config.head_dim for edge in part.q)
    query_width, key_width = (
        rows[1] - rows[0] for rows in (piece.rows for piece in qkv_pieces(config, part))
    )
    query_norm_K, query_up = None, None
    if latent.query_rank:
        query_norm_K = loader.fetch(f"{prefix}{names.query_norm}.weight", (latent.query_rank,))
        rows = (first * latent.query_dim, end * latent.query_dim)
        query_up = loader.column_parallel(prefix, [Piece(names.query_up, rows)])
    per_head = latent.plain_dim + latent.value_dim
    shape = (config.num_heads * per_head, latent.rank)
    up = loader.dense(prefix + names.up, shape, Shard(rows=(first * per_head, end * per_head)))
    order_D = _order(config).to(up.device)
    up_NXC = up.view(-1, per_head, latent.rank)
    keys_NPC, values_NVC = torch.split(up_NXC, [latent.plain_dim, latent.value_dim], dim=1)
    return LatentWeights(
        widths=(query_width, key_width - latent.rotated_dim, latent.rotated_dim),
        query_dim=latent.query_dim,
        query_norm_K=query_norm_K,
        query_up=query_up,
        norm_C=loader.fetch(f"{prefix}{names.norm}.weight", (latent.rank,)),
        eps=latent.norm_eps,
        order_D=order_D,
        queries=loader.backend.pack_heads(_to_cache(latent, keys_NPC)[:, order_D]),
        values=loader.backend.pack_heads(_from_cache(latent, values_NVC)[:, :, order_D]),
    )


def _order(config: DecoderConfig) -> torch.Tensor:
    order_D = feature_order(config.ropes, config.head_dim)
    if order_D is None:
        raise RuntimeError("the latent part of a head is not rotated")
    return order_D


def _to_cache(latent: Latent, keys_NPC: torch.Tensor) -> torch.Tensor:
    """(N, rotated + rank, query_dim): the rotated part of a query as it is, then U' of the rest."""
    num_heads = len(keys_NPC)
    weight = keys_NPC.new_zeros(num_heads, latent.rotated_dim + latent.rank, latent.query_dim)
    weight[:, : latent.rotated_dim, latent.plain_dim :] = torch.eye(latent.rotated_dim)
    weight[:, latent.rotated_dim :, : latent.plain_dim] = keys_NPC.transpose(1, 2)
    return weight


def _from_cache(latent: Latent, values_NVC: torch.Tensor) -> torch.Tensor:
    """(N, value_dim, rotated + rank): nothing of the rotated key."""
    num_heads = len(values_NVC)
    weight = values_NVC.new_zeros(num_heads, latent.value_dim, latent.rotated_dim + latent.rank)
    weight[:, :, latent.rotated_dim :] = values_NVC
    return weight
