"""What a step costs, beside the paper's statements."""

from __future__ import annotations

import pytest

from app.simulate.hardware.deployments import load_model
from app.simulate.paper.costs import (
    breakdown_rows,
    cost_rows,
    decodes,
    intensity,
    intensity_rows,
    linear_ms,
    whole_prompts,
)


def test_every_figure_that_costs_bear_has_rows() -> None:
    figures = {row.figure for row in cost_rows()}
    assert figures == {
        "Table 3", "Figure 3", "Figure 4", "Figure 5", "Figure 6", "Section 4.3",
    }  # fmt: skip


def test_the_parts_of_a_step_add_up() -> None:
    shares: dict[str, float] = {}
    for row in breakdown_rows():
        if row.quantity.endswith("/ step"):
            assert row.simulated >= 0.0
            shares[row.setting] = shares.get(row.setting, 0.0) + row.simulated
    assert len(shares) == 5
    assert list(shares.values()) == pytest.approx([1.0] * 5)


def test_mixes_are_what_they_are_called() -> None:
    model = load_model("mistral-7b-a100")
    prompts, batch = whole_prompts(model, 1024, 4), decodes(model, 32, 8192)
    assert (prompts.num_prefills, prompts.num_tokens) == (4, 4096)
    assert (batch.num_decodes, batch.decode_kv_tokens) == (32, 32 * model.attention_window)


def test_more_ranks_and_fewer_tokens_take_less() -> None:
    assert linear_ms("llama2-70b", 8, 512) < linear_ms("llama2-70b", 4, 512)
    assert linear_ms("llama2-70b", 4, 512) < linear_ms("llama2-70b", 4, 1024)


def test_intensity_starts_at_one_operation_a_byte_and_rises() -> None:
    assert intensity(1) == pytest.approx(1.0, rel=0.01)  # a multiply and an add per two bytes
    assert intensity(32) < intensity(512) < intensity(2048)
    assert all(row.deviation == 0.0 for row in intensity_rows() if row.bound)
