"""Convolutions and recurrences with a state in PyTorch: the reference of the other backends.

Shape suffixes as in `kernels.recurrence`. Sums are float32; results are rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from kernels.recurrence import Recurrence, StateLayer, StateRows

_EPS = 1e-6  # of the lengths of queries and keys


def causal_conv(
    x_TC: torch.Tensor,
    weight_JC: torch.Tensor,
    bias_C: torch.Tensor | None,
    layer: StateLayer,
    rows: StateRows,
    silu: bool,
) -> torch.Tensor:
    """See `Recurrent.causal_conv`."""
    out_TC = torch.empty_like(x_TC, memory_format=torch.contiguous_format)
    for slices, tokens in _equally_long(rows):
        x_SLC = x_TC[tokens].reshape(slices.stop - slices.start, -1, x_TC.shape[1])
        before_SJC = _read(layer.conv_RJC, rows.reads_S[slices])
        inputs_SLC = torch.cat((before_SJC, x_SLC), dim=1)
        layer.conv_RJC[rows.writes_S[slices].long()] = inputs_SLC[:, x_SLC.shape[1] :]
        for s, row, length in _saves(rows, slices):
            layer.conv_RJC[row] = inputs_SLC[s, length : length + len(weight_JC) - 1]
        windows_SLCJ = inputs_SLC.float().unfold(1, len(weight_JC), 1)
        y_SLC = (windows_SLCJ * weight_JC.T).sum(-1)
        if bias_C is not None:
            y_SLC += bias_C
        out_TC[tokens] = (functional.silu(y_SLC) if silu else y_SLC).to(x_TC.dtype).flatten(0, 1)
    return out_TC


def recurrence(
    qkv_TC: torch.Tensor,
    decays_TN: torch.Tensor,
    rates_TN: torch.Tensor,
    layer: StateLayer,
    rows: StateRows,
    form: Recurrence,
) -> torch.Tensor:
    """See `Recurrent.recurrence`."""
    if layer.matrix_RNFD is None:
        raise ValueError("a recurrence needs a layer with matrices")
    out_TND = qkv_TC.new_empty((len(qkv_TC), form.num_heads, form.value_dim))
    for slices, tokens in _equally_long(rows):
        num_slices = slices.stop - slices.start
        q_SLNF, k_SLNF, v_SLND = (
            x.reshape(num_slices, -1, *x.shape[1:]) for x in _heads(qkv_TC[tokens].float(), form)
        )
        decays_SLN, rates_SLN = (
            x[tokens].reshape(num_slices, -1, form.num_heads) for x in (decays_TN, rates_TN)
        )
        matrix_SNFD = _read(layer.matrix_RNFD, rows.reads_S[slices])
        out_SLND, saves = torch.empty_like(v_SLND), _saves(rows, slices)
        for i in range(v_SLND.shape[1]):
            key_SNF1, u_SND = k_SLNF[:, i, :, :, None], v_SLND[:, i]
            matrix_SNFD = matrix_SNFD * decays_SLN[:, i, :, None, None]
            if form.delta:
                u_SND = u_SND - (matrix_SNFD * key_SNF1).sum(-2)
            u_SND = u_SND * rates_SLN[:, i, :, None]
            matrix_SNFD = matrix_SNFD + key_SNF1 * u_SND[:, :, None]
            out_SLND[:, i] = (matrix_SNFD * q_SLNF[:, i, :, :, None]).sum(-2)
            for s, row, length in saves:
                if length == i + 1:
                    layer.matrix_RNFD[row] = matrix_SNFD[s]
        layer.matrix_RNFD[rows.writes_S[slices].long()] = matrix_SNFD
        out_TND[tokens] = out_SLND.flatten(0, 1).to(out_TND.dtype)
    return out_TND.flatten(1)


def _equally_long(rows: StateRows) -> Iterator[tuple[slice, slice]]:
    """Slices of equally many tokens, and their tokens: all decodes at once, then the others."""
    decodes, starts = rows.num_decodes, rows.query_starts_S1.tolist()
    if decodes:
        yield slice(0, decodes), slice(0, decodes)
    for s in range(decodes, len(starts) - 1):
        yield slice(s, s + 1), slice(starts[s], starts[s + 1])


def _saves(rows: StateRows, slices: slice) -> list[tuple[int, int, int]]:
    """Of these slices that save a state: (number among them, row, tokens)."""
    if rows.saves_S is None or rows.save_lengths_S is None:
        return []
    pairs = zip(rows.saves_S[slices].tolist(), rows.save_lengths_S[slices].tolist(), strict=True)
    return [(s, row, length) for s, (row, length) in enumerate(pairs) if row >= 0]


def _read(state_RX: torch.Tensor, reads_S: torch.Tensor) -> torch.Tensor:
    """Copies of these rows, zeros for -1."""
    is_first_S = (reads_S < 0).view(-1, *[1] * (state_RX.dim() - 1))
    return state_RX[reads_S.clamp(min=0).long()].masked_fill(is_first_S, 0.0)


def _heads(
    qkv_TC: torch.Tensor, form: Recurrence
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of every head."""
    keys = form.num_key_heads * form.key_dim
    q_TX, k_TX, v_TX = torch.split(qkv_TC, [keys, keys, form.num_heads * form.value_dim], dim=1)
    per_key = form.num_heads // form.num_key_heads
    q_TNF, k_TNF = (
        x.reshape(len(x), form.num_key_heads, -1).repeat_interleave(per_key, dim=1)
        for x in (q_TX, k_TX)
    )
    if form.delta:
        q_TNF, k_TNF = (
            x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS) for x in (q_TNF, k_TNF)
        )
        q_TNF = q_TNF * form.key_dim**-0.5
    return q_TNF, k_TNF, v_TX.reshape(len(v_TX), form.num_heads, -1)
