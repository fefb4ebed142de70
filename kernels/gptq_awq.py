"""The integer tensors of GPTQ, AWQ and compressed-tensors checkpoints, as a `QuantizedWeight`.

They pack values into int32 words, low bits first, and mean scale * (value - zero):

- GPTQ: qweight (K * bits / 32, O) packs along K; qzeros (G, O * bits / 32) along O; scales (G, O);
  g_idx (K,) names each input's group, in any order where "act order" was on. The first format
  stores zero points less one, subtracted from whole words; "gptq_v2" stores them as they are.
- AWQ ("gemm" version): qweight (K, O / 8) and qzeros (G, O / 8) pack eight outputs to a word in the
  order 0 2 4 6 1 3 5 7; scales (G, O); 4 bits only.
- compressed-tensors: weight_packed (O, K * bits / 32) packs along K, zero points (O * bits / 32, G)
  along O; scales (O, G). Its other format is plain: int8 values (O, K) and zero points (O, G).

Sources: the GPTQ and AWQ papers (arXiv 2210.17323, 2306.00978) for the arithmetic, published
checkpoints for the layout.
"""

from __future__ import annotations

import torch

from kernels.quantized import QuantizedWeight

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_WORD = 0xFFFFFFFF
_ROWS = 64
# Groups wider than the kernels support are split into groups of this size with equal scales.
_WIDEST_GROUP = 256
_SPLIT_GROUP = 128


def unpack_gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales_GO: torch.Tensor,
    g_idx: torch.Tensor | None,
    bits: int,
    checkpoint_format: str = "gptq",
    *,
    group_size: int,
) -> QuantizedWeight:
    """One GPTQ layer. checkpoint_format as in its config: "gptq" (the default) or "gptq_v2".

    group_size: inputs that share a scale, fewer in the last group; 0 or less: all of a row.
    ValueError where the tensors do not fit together or to the groups, or bits is not 4 or 8.
    """
    if bits not in (4, 8):
        raise ValueError(f"{bits}-bit GPTQ weights are not supported, only 4 and 8")
    if checkpoint_format not in ("gptq", "gptq_v2"):
        raise ValueError(f"GPTQ checkpoint format {checkpoint_format!r} is unknown")
    values_KO = _unpack(qweight.T.contiguous(), bits).T
    words = qzeros.long() & _WORD
    if checkpoint_format == "gptq":
        ones = 0x11111111 if bits == 4 else 0x01010101
        words = (words + ones) & _WORD
    zeros_GO = _unpack(words, bits)
    permutation_K = None
    if g_idx is not None and g_idx.numel() > 0:
        permutation_K = _by_group(g_idx.long(), values_KO.shape[0], group_size)
        if permutation_K is not None:
            values_KO = values_KO[permutation_K]
    return _assemble(values_KO, zeros_GO, scales_GO, bits, group_size, permutation_K)


def unpack_awq(
    qweight: torch.Tensor, qzeros: torch.Tensor, scales_GO: torch.Tensor, *, group_size: int
) -> QuantizedWeight:
    """One AWQ layer (4 bits). group_size, ValueError: as for `unpack_gptq`."""
    order = torch.tensor(_AWQ_ORDER)
    values_KO, zeros_GO = (
        torch.empty_like(packed).index_copy_(1, _places(packed.shape[1], order), packed)
        for packed in (_unpack(qweight, 4), _unpack(qzeros, 4))
    )
    return _assemble(values_KO, zeros_GO, scales_GO, 4, group_size, None)


def unpack_compressed(
    packed: torch.Tensor,
    zero_point: torch.Tensor | None,
    scales_OG: torch.Tensor,
    g_idx: torch.Tensor | None,
    bits: int,
    in_features: int,
    *,
    group_size: int,
) -> QuantizedWeight:
    """One "pack-quantized" layer. group_size, ValueError: as for `unpack_gptq`."""
    values_KO = _unpack(packed, bits)[:, :in_features].T
    zeros_GO = torch.full_like(scales_OG.T, 1 << (bits - 1))
    if zero_point is not None:
        zeros_GO = _unpack(zero_point.T.contiguous(), bits)[:, : scales_OG.shape[0]]
    permutation_K = None
    # Filled with -1 by compressed-tensors where no order was found: columns are in their order.
    if g_idx is not None and not bool((g_idx == -1).all()):
        permutation_K = _by_group(g_idx.long(), in_features, group_size)
        if permutation_K is not None:
            values_KO = values_KO[permutation_K]
    return _assemble(values_KO, zeros_GO, scales_OG.T, bits, group_size, permutation_K)


def unpack_int8(
    values_OK: torch.Tensor,
    zero_point_OG: torch.Tensor | None,
    scales_OG: torch.Tensor,
    *,
    group_size: int,
) -> QuantizedWeight:
    """One "int-quantized" layer. group_size, ValueError: as for `unpack_gptq`."""
    if values_OK.dtype != torch.int8:
        raise ValueError(f"its weight is {values_OK.dtype}, not int8")
    zeros_GO = torch.full_like(scales_OG.T, 128)
    if zero_point_OG is not None:
        if zero_point_OG.numel() == 1:  # of the whole tensor
            zero_point_OG = zero_point_OG.reshape(1, 1).expand(scales_OG.shape)
        zeros_GO = zero_point_OG.reshape(scales_OG.shape).T.to(torch.int16) + 128
    values_KO = values_OK.T.to(torch.int16) + 128
    return _assemble(values_KO, zeros_GO, scales_OG.T, 8, group_size, None)


def _places(width: int, order: torch.Tensor) -> torch.Tensor:
    """The position of each packed value; the order repeats every eight."""
    words = torch.arange(0, width, 8)
    return (words[:, None] + order).flatten()


def _unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """(N, W) words to (N, W * 32 / bits) values from 0, as int16."""
    if words.dtype != torch.int64:
        words = words.int()
    shifts, mask = torch.arange(0, 32, bits, dtype=words.dtype), (1 << bits) - 1
    num_rows, width = words.shape
    values = torch.empty(num_rows, width * len(shifts), dtype=torch.int16)
    for row in range(0, num_rows, _ROWS):  # wider types for a few rows at a time only
        block = words[row : row + _ROWS, :, None]
        values[row : row + _ROWS] = ((block >> shifts) & mask).flatten(1)
    return values


def _by_group(group_of_K: torch.Tensor, in_features: int, group_size: int) -> torch.Tensor | None:
    """The order of inputs that brings groups together; None where they already are."""
    if group_of_K.shape != (in_features,):
        raise ValueError(f"g_idx is {tuple(group_of_K.shape)}, not ({in_features},)")
    if bool((group_of_K < 0).any()):
        raise ValueError(f"g_idx names group {int(group_of_K.min())}")
    expected_K = torch.arange(in_features) // (group_size if group_size > 0 else in_features)
    sorted_K, order_K = torch.sort(group_of_K, stable=True)
    if not torch.equal(sorted_K, expected_K):
        raise ValueError(f"g_idx has groups of other sizes than {group_size}")
    return None if torch.equal(group_of_K, expected_K) else order_K


def _assemble(
    values_KO: torch.Tensor,
    zeros_GO: torch.Tensor,
    scales_GO: torch.Tensor,
    bits: int,
    group_size: int,
    permutation_K: torch.Tensor | None,
) -> QuantizedWeight:
    in_features, out_features = values_KO.shape
    group = group_size if group_size > 0 else in_features
    num_groups = -(-in_features // group) if group else 1
    if scales_GO.shape != (num_groups, out_features) or zeros_GO.shape != scales_GO.shape:
        raise ValueError(
            f"scales {tuple(scales_GO.shape)} and zeros {tuple(zeros_GO.shape)} do not fit "
            f"{out_features} outputs, and {in_features} inputs in {num_groups} groups"
        )
    middle = 1 << (bits - 1)
    values_OK = (values_KO.T - middle).to(torch.int8).contiguous()
    zeros_OG = (zeros_GO.T - middle).float()
    scales_OG = scales_GO.T.float()
    symmetric = not bool(zeros_OG.any())
    if num_groups == 1 and symmetric:
        group = 0
    elif num_groups == 1:
        group = -(-in_features // 8) * 8
    if group > _WIDEST_GROUP:
        if group % _SPLIT_GROUP and num_groups > 1:
            raise ValueError(
                f"group size {group} is neither up to {_WIDEST_GROUP} nor whole {_SPLIT_GROUP}s"
            )
        num_splits, needed = -(-group // _SPLIT_GROUP), -(-in_features // _SPLIT_GROUP)
        scales_OG = scales_OG.repeat_interleave(num_splits, dim=1)[:, :needed]
        zeros_OG = zeros_OG.repeat_interleave(num_splits, dim=1)[:, :needed]
        group = _SPLIT_GROUP
    return QuantizedWeight(
        values_OK, scales_OG, bits, group, None if symmetric else zeros_OG, permutation_K
    )
