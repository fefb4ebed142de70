"""Convolutions and recurrences with a state against their float64 references: the cases of the
tests and of the bench."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch

from app.bench.gpu.checks import BOUNDS, CheckResult, poisoned_outputs
from kernels.interface import Backend
from kernels.recurrence import Recurrence, StateLayer, StateRows
from kernels.triton import reference


@dataclass(frozen=True, slots=True)
class RecurrenceCase:
    """lengths: of the slices. pad: (tokens, slices) added, as a captured graph does. saves: after
    how many tokens each slice saves its state; 0 for none."""

    name: str
    form: Recurrence
    lengths: tuple[int, ...]
    taps: int = 4
    pad: tuple[int, int] = (0, 0)
    saves: tuple[int, ...] | None = None
    plain: bool = False  # a convolution without bias and SiLU


_HYBRID = (1, 1, 2, 3, 5)
_HEADS = Recurrence(num_key_heads=2, num_heads=4, key_dim=32, value_dim=16, delta=True)
_ODD = Recurrence(num_key_heads=1, num_heads=1, key_dim=5, value_dim=7, delta=True)
SMALL_RECURRENCES = (
    RecurrenceCase("one token", _ODD, (1,)),
    RecurrenceCase("hybrid", _HEADS, _HYBRID),
    RecurrenceCase("padded decodes", _HEADS, (1, 1), pad=(2, 2)),
    RecurrenceCase("padded hybrid", _ODD, _HYBRID, pad=(7, 4)),
    RecurrenceCase("only padding", _ODD, (), pad=(3, 3)),
    RecurrenceCase("saved", _ODD, _HYBRID, pad=(1, 1), saves=(1, 0, 1, 3, 4)),
    RecurrenceCase("two taps", _ODD, (1, 2, 9), taps=2, saves=(0, 1, 2)),
    RecurrenceCase("one tap", _ODD, (1, 2), taps=1, plain=True),
    RecurrenceCase("two heads to a key", Recurrence(1, 2, 3, 20, delta=False), (4,)),
    RecurrenceCase("chunks", _ODD, (1, 63, 65, 130), pad=(2, 2), plain=True),
    RecurrenceCase("saved chunks", _ODD, (65, 70, 129, 64), pad=(9, 2), saves=(64, 2, 70, 0)),
    RecurrenceCase("chunks of two halves", Recurrence(1, 1, 100, 17, delta=True), (2, 64)),
    RecurrenceCase("saved halves", Recurrence(1, 1, 100, 9, delta=True), (65,), saves=(9,)),
    RecurrenceCase("chunks without the rule", Recurrence(1, 2, 20, 16, delta=False), (70,)),
    RecurrenceCase("key of 256", Recurrence(1, 1, 256, 9, delta=True), (1, 2), plain=True),
)
_QWEN3_NEXT = Recurrence(num_key_heads=16, num_heads=32, key_dim=128, value_dim=128, delta=True)
FULL_RECURRENCES = (
    RecurrenceCase("140 decodes", _QWEN3_NEXT, (1,) * 140),
    RecurrenceCase("2000 tokens", _QWEN3_NEXT, (2000,)),
    RecurrenceCase("chunk of 500 and 12 decodes", _QWEN3_NEXT, (*(1,) * 12, 500), pad=(0, 51)),
)


@dataclass(slots=True)
class RecurrenceInputs:
    """Of both operations; rows of x and qkv lie within longer ones."""

    x_TC: torch.Tensor
    weight_JC: torch.Tensor
    bias_C: torch.Tensor | None
    qkv_TC: torch.Tensor
    decays_TN: torch.Tensor
    rates_TN: torch.Tensor
    layer: StateLayer
    rows: StateRows


def recurrence_inputs(
    case: RecurrenceCase, dtype: torch.dtype, device: torch.device
) -> RecurrenceInputs:
    """Random numbers; every third slice begins with zeros. States that are not read are NaN, and
    padding slices name rows that there are not."""
    num_slices, num_tokens = len(case.lengths), sum(case.lengths)
    form, T = case.form, num_tokens + case.pad[0]
    channels = form.num_channels
    x_TX, qkv_TX = torch.randn(2, T, channels + 16, device=device).to(dtype)
    *gates, _ = torch.rand(3, T, form.num_heads + 1, device=device).to(torch.float32)
    decays_TN, rates_TN = (gate[:, : form.num_heads] for gate in gates)
    row_R = torch.randperm(3 * num_slices + 1, device=device)
    reads_S, writes_S, saves_S = row_R[:-1].view(3, -1).clone().unbind()
    reads_S[::3] = -1
    sizes = (form.num_heads, form.key_dim, form.value_dim)
    conv_RJC = torch.full((len(row_R), case.taps - 1, channels), torch.nan, device=device)
    matrix_RNFD = torch.full((len(row_R), *sizes), torch.nan, device=device)
    for state in (conv_RJC, matrix_RNFD):
        given = state[reads_S[reads_S >= 0]]
        state[reads_S[reads_S >= 0]] = torch.randn_like(given)
    nowhere = torch.full((case.pad[1],), 10**9, device=device)
    starts = torch.tensor([0, *accumulate(case.lengths), *[num_tokens] * case.pad[1]])
    rows = StateRows(
        starts.to(device, torch.int32),
        torch.cat((reads_S, nowhere)).to(torch.int32),
        torch.cat((writes_S, nowhere)).to(torch.int32),
        num_decodes=[*(length == 1 for length in case.lengths), False].index(False),
    )
    if case.saves is not None:
        lengths_S = torch.tensor(case.saves, dtype=torch.int64, device=device)
        saves_S = torch.where(lengths_S > 0, saves_S, -1)
        rows.saves_S = torch.cat((saves_S, nowhere)).to(torch.int32)
        rows.save_lengths_S = torch.cat((lengths_S, nowhere)).to(torch.int32)
    return RecurrenceInputs(
        x_TX[:, 8 : channels + 8],
        torch.randn(case.taps, channels, device=device),
        None if case.plain else torch.randn(channels, device=device),
        qkv_TX[:, 8 : channels + 8],
        decays_TN,
        rates_TN,
        StateLayer(conv_RJC.to(dtype), matrix_RNFD),
        rows,
    )


def run_recurrence(
    case: RecurrenceCase, given: RecurrenceInputs, backend: Backend
) -> tuple[torch.Tensor, torch.Tensor]:
    """What both operations return; they do not depend on each other here."""
    layer, rows = given.layer, given.rows
    mixed_TC = backend.causal_conv(
        given.x_TC, given.weight_JC, given.bias_C, layer, rows, silu=not case.plain
    )
    args = (given.qkv_TC, given.decays_TN, given.rates_TN, layer, rows, case.form)
    return mixed_TC, backend.recurrence(*args)


def check_recurrence(
    case: RecurrenceCase, backend: Backend, dtype: torch.dtype, device: torch.device
) -> Iterator[CheckResult]:
    """Both operations: what they return, the states that they leave, and that no others change."""
    given = recurrence_inputs(case, dtype, device)
    layer, rows = given.layer, given.rows
    assert layer.matrix_RNFD is not None
    conv_RJC, matrix_RNFD = layer.conv_RJC.clone(), layer.matrix_RNFD.clone()
    with poisoned_outputs():
        mixed_TC, out_TX = run_recurrence(case, given, backend)
    pairs: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {
        "convolution": [], "its state": [], "recurrence": [], "its matrix": [],
    }  # fmt: skip
    written = torch.zeros(len(conv_RJC), dtype=torch.bool, device=device)
    starts, reads = rows.query_starts_S1.tolist(), rows.reads_S.tolist()
    for s, length in enumerate(case.lengths):
        read, begin = reads[s], starts[s]
        ends = {int(rows.writes_S[s]): length}
        if rows.saves_S is not None and case.saves is not None and case.saves[s]:
            ends[int(rows.saves_S[s])] = case.saves[s]
        for row, count in ends.items():
            tokens = slice(begin, begin + count)
            written[row] = True
            y_LC, left_JC = reference.causal_conv(
                given.x_TC[tokens], given.weight_JC, given.bias_C,
                conv_RJC[read] if read >= 0 else torch.zeros_like(conv_RJC[0]),
                silu=not case.plain,
            )  # fmt: skip
            out_LX, left_NFD = reference.recurrence(
                given.qkv_TC[tokens], given.decays_TN[tokens], given.rates_TN[tokens],
                matrix_RNFD[read] if read >= 0 else torch.zeros_like(matrix_RNFD[0]), case.form,
            )  # fmt: skip
            pairs["convolution"].append((mixed_TC[tokens], y_LC))
            pairs["its state"].append((layer.conv_RJC[row], left_JC))
            pairs["recurrence"].append((out_TX[tokens], out_LX))
            pairs["its matrix"].append((layer.matrix_RNFD[row], left_NFD))
    kept = all(
        torch.equal(now[~written].nan_to_num(123.0), before[~written].nan_to_num(123.0))
        for now, before in ((layer.conv_RJC, conv_RJC), (layer.matrix_RNFD, matrix_RNFD))
    )
    for what, found in pairs.items():
        error = 0.0 if kept else math.inf
        if found:
            out, expected = (
                torch.cat([x.flatten() for x in xs]) for xs in zip(*found, strict=True)
            )
            error = max(error, reference.relative_error(out, expected))
        name = f"{backend.name} {what}: {case.name}"
        bound = 0.0 if what == "its state" else BOUNDS[dtype]
        yield CheckResult(name, str(dtype).removeprefix("torch."), error, bound)
