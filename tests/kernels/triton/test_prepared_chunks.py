"""What chunks do not take from each other, against its definition in float64."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be tested")
ON_GPU = os.environ.get("TRITON_INTERPRET") != "1"

from app.bench.gpu.recurrence_checks import RecurrenceCase, recurrence_inputs  # noqa: E402
from kernels.recurrence import Recurrence  # noqa: E402
from kernels.triton.prepared_chunks import prepare  # noqa: E402
from kernels.triton.reference import relative_error  # noqa: E402

DEVICE = torch.device("cuda" if ON_GPU else "cpu")
FORM = Recurrence(num_key_heads=1, num_heads=1, key_dim=16, value_dim=4, delta=True)


@pytest.mark.parametrize(
    ("lengths", "saves", "chunks"),
    [
        ((66,), None, [(0, 64), (64, 66)]),
        ((3, 70), (0, 5), [(3, 8), (8, 72), (72, 73)]),
        ((64, 65), (64, 64), [(0, 64), (64, 128), (128, 129)]),
    ],
)
def test_each_chunk_has_its_inverse(
    lengths: tuple[int, ...], saves: tuple[int, ...] | None, chunks: list[tuple[int, int]]
) -> None:
    torch.manual_seed(0)
    case = RecurrenceCase("", FORM, lengths, pad=(2, 2), saves=saves)
    given = recurrence_inputs(case, torch.float16, DEVICE)
    solved_TNL, weights_TNL, scales_TN2 = prepare(
        given.qkv_TC, given.decays_TN, given.rates_TN, given.rows, FORM, 16
    )
    for begin, end in chunks:
        q, k, _ = torch.split(given.qkv_TC[begin:end].double(), [16, 16, 4], 1)
        q_scale, k_scale = (torch.rsqrt(x.square().sum(1) + 1e-6) for x in (q, k))
        q_scale = q_scale / 4
        sums = given.decays_TN[begin:end, 0].double().log().cumsum(0)
        decays = (sums[:, None] - sums).exp().tril()
        rates = given.rates_TN[begin:end, 0].double()
        keys = k * k_scale[:, None]
        lower = (rates[:, None] * decays * (keys @ keys.T)).tril(-1)
        eye = torch.eye(end - begin, dtype=torch.float64, device=DEVICE)
        length = end - begin
        for found, expected in (
            (solved_TNL[begin:end, 0, :length], torch.linalg.inv(eye + lower) * rates),
            (weights_TNL[begin:end, 0, :length], decays * (q_scale[:, None] * q @ keys.T)),
            (scales_TN2[begin:end, 0], torch.stack((q_scale, k_scale), 1)),
        ):
            assert relative_error(found, expected) <= 2e-5
