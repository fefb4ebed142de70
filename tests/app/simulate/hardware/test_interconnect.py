"""KV between engines: its bytes by the shape, and transfers that share a link."""

from __future__ import annotations

import doctest

import pytest

from app.simulate.hardware import interconnect
from app.simulate.hardware.deployments import PAPER
from app.simulate.hardware.interconnect import (
    INTERCONNECTS,
    Interconnect,
    Links,
    kv_bytes_per_token,
    parse_interconnect,
    shape_of,
)
from app.simulate.hardware.shapes import MODELS


@pytest.mark.parametrize("model", sorted(PAPER))
def test_kv_of_the_paper_s_models(model: str) -> None:
    """Layers x keys and values x heads x dimension x two bytes, as the cost models count it."""
    shape = shape_of(model)
    assert shape == PAPER[model][0]
    assert kv_bytes_per_token(shape) == MODELS[shape].kv_bytes_per_token
    assert kv_bytes_per_token("mistral-7b") == 32 * 2 * 8 * 128 * 2


def test_unknown_shapes_and_interconnects_are_named() -> None:
    assert shape_of("llama-135m-cpu-2-cores") == "llama-135m"
    assert shape_of("machine-of-mine") == ""
    with pytest.raises(ValueError, match="yi-34b"):
        kv_bytes_per_token("")
    for text in ("token ring", "0,1", "1", "1,-1", "nan,1"):
        with pytest.raises(ValueError, match="nvlink, ethernet"):
            parse_interconnect(text)
    assert doctest.testmod(interconnect).failed == 0


def test_a_transfer_takes_its_bytes_over_the_bandwidth_and_the_latency() -> None:
    link = Interconnect("wire", 1e9, 0.002)
    assert Links(link).send("a", "b", 3e9, 10.0) == pytest.approx(13.002)
    assert link.transfer_s(3e9) == pytest.approx(3.002)
    assert INTERCONNECTS["nvlink"].transfer_s(3e9) == pytest.approx(0.01001)
    assert INTERCONNECTS["ethernet"].transfer_s(1e9) == pytest.approx(0.1001)


def test_transfers_queue_at_both_ends() -> None:
    links = Links(Interconnect("wire", 1e9, 0.5))
    assert links.send("a", "x", 1e9, 0.0) == pytest.approx(1.5)
    assert links.send("a", "y", 1e9, 0.0) == pytest.approx(2.5)  # behind the first at a
    assert links.send("b", "x", 1e9, 0.0) == pytest.approx(2.5)  # behind the first at x
    assert links.send("c", "z", 1e9, 0.0) == pytest.approx(1.5)  # beside them
    assert links.send("a", "z", 1e9, 9.0) == pytest.approx(10.5)  # latency holds no link
    assert links.num_bytes == 5e9
    assert links.busy_s["a"] == pytest.approx(3.0)
