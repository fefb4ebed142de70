"""`legato simulate`'s options of roles and moves: the deployment that each set gives."""

from __future__ import annotations

import pytest

from app.simulate.hardware.interconnect import INTERCONNECTS, kv_bytes_per_token
from app.simulate.options import EngineOptions
from app.simulate.run.deployment import Division, SharedKV
from app.simulate.way_options import WayOptions

MISTRAL = "mistral-7b-a100"
KV_BYTES = kv_bytes_per_token("mistral-7b")


def test_a_way_divides_its_engines_over_the_interconnect() -> None:
    ways = WayOptions(way="flexible", prefill_engines=1, decode_engines=3)
    made = ways.deployment(EngineOptions(MISTRAL))
    assert made.num_replicas == 4
    assert made.division == Division("flexible", 1, INTERCONNECTS["nvlink"], KV_BYTES)
    assert made.shared_kv is None
    assert not made.config.prefix_cache


def test_colocated_streams_move_with_their_kv_over_an_interconnect_and_without_it_anew() -> None:
    engines = EngineOptions(MISTRAL, replicas=2)
    without = WayOptions(drain=3.0).deployment(engines)
    assert without.drains == ((3.0, 0),)
    assert without.shared_kv is None
    moved = WayOptions(drain=3.0, rebalance=True, interconnect="ethernet").deployment(engines)
    assert moved.shared_kv == SharedKV(INTERCONNECTS["ethernet"], KV_BYTES)
    assert moved.config.prefix_cache, "KV is found by its digest"
    assert moved.rebalance
    assert moved.division is without.division is None


def test_plain_engines_are_one_unless_replicas_say_otherwise() -> None:
    plain = WayOptions().deployment(EngineOptions(MISTRAL))
    assert plain.num_replicas == 1
    assert plain.routing == "slack"
    assert not plain.config.prefix_cache
    assert plain.config.overlap_chunks, "a prompt's chunks follow each other as in the engine"


def test_the_size_of_kv_comes_from_a_shape_and_must_be_known() -> None:
    named = WayOptions(way="split", shape="yi-34b").divided("split", 1, "machine-of-mine")
    assert named.kv_bytes_per_token == kv_bytes_per_token("yi-34b")
    with pytest.raises(ValueError, match="split engines need --shape"):
        WayOptions(way="split").divided("split", 1, "machine-of-mine")
    with pytest.raises(ValueError, match="--interconnect needs --shape"):
        WayOptions(interconnect="nvlink", drain=1.0).shared_kv("machine-of-mine")
