"""Several engines as one."""

from __future__ import annotations

from dataclasses import replace

from app.fleet.overview import occupancy
from app.telemetry.prometheus import Metrics, render
from tests.actors.fleet.pictures import snapshot


def test_gauges_add_the_engines_up() -> None:
    engines = [
        replace(snapshot(name), num_running=3, num_waiting=1, num_blocks=100, num_free_blocks=free)
        for name, free in (("a", 100), ("b", 50))
    ]
    assert occupancy(engines) == (6, 2, 0.25)
    assert occupancy([]) == (0, 0, 0.0)
    metrics = Metrics("m")
    metrics.occupied(*occupancy(engines))
    shown = render([metrics]).decode()
    assert 'legato_num_requests_running{model_name="m"} 6.0' in shown
    assert 'legato_kv_cache_usage_perc{model_name="m"} 0.25' in shown
