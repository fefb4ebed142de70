"""Convolutions and recurrences with a state equal those of transformers, in any chunks."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as reference

from kernels.recurrence import Recurrence, StateLayer, StateRows
from kernels.torch.recurrence import causal_conv, recurrence
from tests.kernels import recurrent_batches as batches


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("chunks", [[11], [4, 7], [1] * 11, [2, 1, 5, 3]])
@pytest.mark.parametrize("biased", [False, True])
def test_a_convolution(chunks: list[int], biased: bool) -> None:
    x_TC, weight_JC, bias_C = torch.randn(11, 6), torch.randn(4, 6), torch.randn(6)
    layer = StateLayer(torch.full((4, 3, 6), 7.0))
    found = batches.in_chunks(
        chunks,
        lambda tokens, rows: causal_conv(
            x_TC[tokens], weight_JC, bias_C if biased else None, layer, rows, silu=True
        ),
    )
    expected = reference.causal_conv1d_fn(
        x_TC.T[None], weight_JC.T, bias_C if biased else None, activation="silu"
    )[0].T
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("chunks", [[11], [4, 7], [1] * 11])
def test_the_gated_delta_rule(chunks: list[int]) -> None:
    form = Recurrence(num_key_heads=2, num_heads=6, key_dim=8, value_dim=4, delta=True)
    qkv_TC, decays_TN, rates_TN = batches.inputs(form, 11)
    layer = StateLayer(torch.empty(0), torch.full((4, 6, 8, 4), 7.0))
    found = batches.in_chunks(
        chunks,
        lambda tokens, rows: recurrence(
            qkv_TC[tokens], decays_TN[tokens], rates_TN[tokens], layer, rows, form
        ),
    )
    q, k, v = torch.split(qkv_TC[None], [16, 16, 24], dim=2)
    expected, state = reference.torch_recurrent_gated_delta_rule(
        q.unflatten(2, (2, 8)), k.unflatten(2, (2, 8)), v.unflatten(2, (6, 4)),
        decays_TN.log()[None], rates_TN[None], output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    torch.testing.assert_close(found, expected[0].flatten(1))
    assert layer.matrix_RNFD is not None
    torch.testing.assert_close(layer.matrix_RNFD[batches.last_row(chunks)], state[0])


def test_a_recurrence_without_the_delta_rule_is_a_decaying_sum() -> None:
    form = Recurrence(num_key_heads=1, num_heads=2, key_dim=3, value_dim=5, delta=False)
    qkv_TC, decays_TN, rates_TN = batches.inputs(form, 6)
    layer = StateLayer(torch.empty(0), torch.zeros(4, 2, 3, 5))
    found = batches.in_chunks(
        [6],
        lambda tokens, rows: recurrence(qkv_TC, decays_TN, rates_TN, layer, rows, form),
    )
    q, k, v = torch.split(qkv_TC, [3, 3, 10], dim=1)
    for n in range(2):
        for t in range(6):
            weights = [
                decays_TN[s + 1 : t + 1, n].prod() * rates_TN[s, n] * (q[t] @ k[s])
                for s in range(t + 1)
            ]
            expected = sum(w * v[s, 5 * n : 5 * n + 5] for s, w in enumerate(weights))
            torch.testing.assert_close(found[t, 5 * n : 5 * n + 5], expected)


def test_slices_of_a_hybrid_batch_do_not_mix() -> None:
    """Two decodes, a prompt's first chunk and another's second."""
    form = Recurrence(num_key_heads=2, num_heads=2, key_dim=8, value_dim=8, delta=True)
    batches.check_hybrid(form, causal_conv, recurrence)


def test_a_layer_without_matrices_has_no_recurrence() -> None:
    form = Recurrence(num_key_heads=1, num_heads=1, key_dim=2, value_dim=2, delta=True)
    rows = StateRows(torch.tensor([0, 1]), torch.tensor([-1]), torch.tensor([0]), 1)
    with pytest.raises(ValueError, match="needs a layer with matrices"):
        recurrence(
            torch.zeros(1, 6), torch.ones(1, 1), torch.ones(1, 1),
            StateLayer(torch.empty(0)), rows, form,
        )  # fmt: skip
