"""The settings of live fleets; the engines themselves are started by `legato bench`."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.fleet.way_router import WayRouter
from app.bench.studies.live_fleet import args_of, block_bytes, router_of
from app.settings.load import parse, resolve
from app.simulate.hardware.interconnect import kv_bytes_per_token

CONFIG = Path("configs/serve/bench_135m.yaml")


def test_engines_have_a_thread_each_and_share_kv() -> None:
    args = args_of(CONFIG, 80.0, 1500.0, shared_gib=0.25)
    found = resolve(parse(args))
    assert found.stage.num_threads == 1
    assert (found.scheduler.tbt_s, found.scheduler.ttft_s) == (0.08, 1.5)
    assert found.kv.shared_cache_gib == 0.25
    assert found.scheduler.drafter == "none"
    assert "listen" not in args


@pytest.mark.parametrize(("dtype", "factor"), [("bfloat16", 1), ("float32", 2), ("auto", 1)])
def test_a_block_has_the_bytes_of_its_tokens(dtype: str, factor: int) -> None:
    args = args_of(CONFIG, 100.0, 2000.0)
    args["model"] = {**args["model"], "dtype": dtype}
    assert block_bytes(args) == 16 * factor * kv_bytes_per_token("llama-135m")


def test_fronts_route_by_the_way() -> None:
    assert not isinstance(router_of("colocated"), WayRouter)
    for way in ("split", "flexible"):
        router = router_of(way)
        assert isinstance(router, WayRouter)
        assert type(router.way).__name__.lower() == way
