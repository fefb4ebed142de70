"""Batches for the operations of `kernels.recurrence`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from kernels.recurrence import Recurrence, StateLayer, StateRows


def inputs(
    form: Recurrence, num_tokens: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values side by side; decays; rates."""
    qkv_TC = torch.randn(num_tokens, form.num_channels).to(dtype)
    return qkv_TC, *torch.rand(2, num_tokens, form.num_heads).unbind()


def state_rows(
    lengths: Sequence[int], reads: Sequence[int], writes: Sequence[int],
    saves: Sequence[tuple[int, int]] | None = None,
) -> StateRows:  # fmt: skip
    """saves: a row, or -1, and after how many tokens, for each slice."""
    decodes = [length == 1 for length in lengths]
    saved = None if saves is None else torch.tensor(saves, dtype=torch.int32)
    return StateRows(
        torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        torch.tensor(reads, dtype=torch.int32),
        torch.tensor(writes, dtype=torch.int32),
        num_decodes=[*decodes, False].index(False),
        saves_S=None if saved is None else saved[:, 0].contiguous(),
        save_lengths_S=None if saved is None else saved[:, 1].contiguous(),
    )


def last_row(chunks: Sequence[int]) -> int:
    """Where `in_chunks` leaves the state."""
    return 2 + (len(chunks) - 1) % 2


def in_chunks(
    chunks: Sequence[int], operation: Callable[[slice, StateRows], torch.Tensor]
) -> torch.Tensor:
    """The result for one request whose tokens come in these chunks, states in rows 2 and 3."""
    found, begin = [], 0
    for number, length in enumerate(chunks):
        read = -1 if number == 0 else 2 + (number - 1) % 2
        rows = state_rows([length], [read], [2 + number % 2])
        found.append(operation(slice(begin, begin + length), rows))
        begin += length
    return torch.cat(found)


def check_hybrid(
    form: Recurrence,
    causal_conv: Callable[..., torch.Tensor],
    recurrence: Callable[..., torch.Tensor],
    dtype: torch.dtype = torch.float32,
    exact: bool = False,
) -> None:
    """A batch's slices have the results and leave the states that each has alone, and save those
    that it has after its first tokens; exact: of the same bits. A second time in the same rows,
    too."""
    lengths, reads, writes = [1, 1, 7, 5], [0, 3, -1, 4], [1, 2, 6, 5]
    saves = [(8, 1), (-1, 0), (9, 4), (10, 2)]
    starts = [0, *accumulate(lengths)]
    channels = form.num_channels
    wide_TX = torch.randn(starts[-1], channels + 5).to(dtype)
    qkv_TC = wide_TX[:, 2 : channels + 2]  # rows within longer ones
    _, decays_TN, rates_TN = inputs(form, starts[-1])
    weight_JC, bias_C = torch.randn(4, channels), torch.randn(channels)
    sizes = (form.num_heads, form.key_dim, form.value_dim)
    layer = StateLayer(torch.randn(11, 3, channels).to(dtype), torch.randn(11, *sizes))
    alone = StateLayer(layer.conv_RJC.clone(), layer.matrix_RNFD.clone())  # type: ignore[union-attr]
    rows = state_rows(lengths, reads, writes, saves)

    def compute(
        tokens: slice, layer: StateLayer, rows: StateRows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mixed_TC = causal_conv(qkv_TC[tokens], weight_JC, bias_C, layer, rows, silu=True)
        args = (decays_TN[tokens], rates_TN[tokens], layer, rows, form)
        return mixed_TC, recurrence(mixed_TC, *args)

    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {}
    for _ in range(2):
        found = compute(slice(None), layer, rows)
    for s, length in enumerate(lengths):
        tokens = slice(starts[s], starts[s + 1])
        expected = compute(tokens, alone, state_rows([length], [reads[s]], [writes[s]]))
        for whole, part in zip(found, expected, strict=True):
            torch.testing.assert_close(whole[tokens], part, **tolerance)
        if saves[s][0] >= 0:
            row, length = saves[s]
            begin = slice(starts[s], starts[s] + length)
            compute(begin, alone, state_rows([length], [reads[s]], [row]))
    torch.testing.assert_close(layer.conv_RJC, alone.conv_RJC, **tolerance)
    torch.testing.assert_close(layer.matrix_RNFD, alone.matrix_RNFD, **tolerance)
