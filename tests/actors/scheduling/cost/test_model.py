"""The cost model: tables with jumps, causal work, the largest chunk, and data in and out."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.scheduling.build import build_core
from actors.scheduling.config import ConfigError, SchedulerConfig
from actors.scheduling.cost.mix import Mix, causal_pairs
from actors.scheduling.cost.model import CostModel, StepTable
from actors.scheduling.plan import Slice, StepShape


def model(**changes: object) -> CostModel:
    values: dict[str, object] = {
        "name": "test",
        "tokens_s": ((1, 0.010), (128, 0.012), (129, 0.020), (1024, 0.100)),
        "overhead_s": 0.001,
        "per_request_s": 1e-5,
        "prefill_slice_s": 2e-5,
        "prefill_kv_s": 1e-8,
        "prefill_pair_s": 1e-9,
        "prefill_square_s": 1e-9,
        "decode_slice_s": 1e-6,
        "decode_kv_s": 2e-8,
        **changes,
    }
    return CostModel(**values)  # type: ignore[arg-type]


def test_table_interpolates_jumps_and_extends() -> None:
    table = StepTable(((1, 0.010), (128, 0.012), (129, 0.020), (256, 0.024)))
    assert table(0) == 0.0
    assert table(1) == 0.010
    assert table(128) == pytest.approx(0.012)
    assert table(129) == pytest.approx(0.020)
    assert table(512) > table(256)
    assert table.largest(0.019) == 128
    assert table.largest(0.0099) == 0
    assert table(table.largest(0.05)) <= 0.05 < table(table.largest(0.05) + 1)


@pytest.mark.parametrize("knots", [((4, 1.0), (2, 2.0)), ((1, 2.0), (2, 1.0)), ((-1, 0.0),)])
def test_table_refuses_what_falls(knots: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ValueError):
        StepTable(knots)


@given(st.integers(0, 60), st.integers(1, 60), st.integers(0, 70))
def test_causal_pairs_counts_them(start: int, num_tokens: int, window: int) -> None:
    counted = sum(
        min(position + 1, window) if window else position + 1
        for position in range(start, start + num_tokens)
    )
    assert causal_pairs(start, num_tokens, window) == counted


def test_mix_of_slices_equals_mix_of_shape() -> None:
    slices = (Slice(1, 99, 1, True), Slice(2, 9, 1, True), Slice(3, 64, 32, False))
    shape = StepShape(2, 110, ((64, 32),))
    assert Mix.of(slices) == Mix.of_shape(shape)
    assert Mix.of(slices).num_tokens == shape.num_tokens == 34


def test_a_window_bounds_what_decodes_read() -> None:
    mix = Mix.of((Slice(1, 999, 1, True), Slice(2, 9, 1, True)), window=100)
    assert mix.decode_kv_tokens == 100 + 10
    # A shape only knows the sum, so it may only overestimate.
    assert Mix.of_shape(StepShape(2, 1010), window=100).decode_kv_tokens >= 110


@given(
    st.integers(0, 200),
    st.integers(0, 4000),
    st.integers(1, 3000),
    st.floats(0.0, 0.5),
    st.sampled_from((0, 256)),
)
def test_largest_chunk_is_the_largest(
    decodes: int, start: int, remaining: int, limit_s: float, window: int
) -> None:
    costs = model(attention_window=window)

    def time_s(chunk: int) -> float:
        mix = Mix(decodes, decodes * 500)
        mix.num_prefills, mix.prefill_tokens = 1, chunk
        mix.prefill_kv_tokens = min(start + chunk, window + chunk) if window else start + chunk
        mix.prefill_pairs = causal_pairs(start, chunk, window)
        mix.prefill_squares = chunk * chunk
        return costs.stage_s(mix)

    chunk = costs.largest_chunk(Mix(decodes, decodes * 500), start, remaining, limit_s)
    assert 0 <= chunk <= remaining
    if chunk:
        assert time_s(chunk) <= limit_s + 1e-9
    if chunk < remaining:
        assert time_s(chunk + 1) > limit_s - 1e-9


def test_latency_walks_the_stages() -> None:
    costs = model(num_stages=3, transfer_s=((1, 0.002),), last_stage_s=((1, 0.005),))
    mix = Mix(4, 400)
    early_s = costs.stage_s(mix) - 0.005
    assert costs.latency_s(mix) == pytest.approx(2 * (early_s + 0.002) + early_s + 0.005)


def test_data_round_trip() -> None:
    costs = model(ratio_quantiles=((0.5, 1.0), (0.99, 1.2)), notes=("a",), source="measured")
    assert CostModel.from_dict(json.loads(json.dumps(costs.to_dict()))) == costs
    assert costs.ratio_at(0.5) == 1.0
    assert costs.ratio_at(0.745) == pytest.approx(1.1)
    assert costs.ratio_at(1.0) == 1.2


def test_bad_data_names_its_keys() -> None:
    with pytest.raises(ValueError, match="speed"):
        CostModel.from_dict({"name": "x", "tokens_s": [[1, 1.0]], "speed": 3})
    with pytest.raises(ValueError, match="tokens_s"):
        CostModel.from_dict({"name": "x"})
    with pytest.raises(ConfigError, match="cost_model"):
        build_core(SchedulerConfig(num_blocks=8, cost_model={"name": "x"}))
