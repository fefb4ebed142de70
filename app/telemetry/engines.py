"""The engines of a front at `/metrics`: their gauges together and by engine.

Series of an engine end with it: engines come and go with the load, and their ids never return.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from actors.transport.messages import IterationRecord
from app.telemetry.causes import Cause


class Published(Protocol):
    """The fields that are read of a snapshot that an engine has published."""

    @property
    def engine_id(self) -> str: ...
    @property
    def accepts(self) -> bool: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_free_blocks(self) -> int: ...
    @property
    def tokens_per_s(self) -> float: ...
    @property
    def least_slack_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class FrontEngines:
    """A front's engines now. num_moves, num_lost: of streams and engines, since it began."""

    published: Sequence[Published]
    num_moves: int = 0
    num_lost: int = 0


@dataclass(frozen=True, slots=True)
class _Engine:
    """last: its newest iteration, if the front has seen one. missed: gaps by cause."""

    said: Published
    last: IterationRecord | None
    missed: Mapping[Cause, int]


def _kv_usage(said: Published) -> float | None:
    return 1.0 - said.num_free_blocks / said.num_blocks if said.num_blocks else None


def _slack_s(said: Published) -> float | None:
    return said.least_slack_s if math.isfinite(said.least_slack_s) else None


# Name, meaning, value of an engine (None: it has none).
_GAUGES: Sequence[tuple[str, str, Callable[[_Engine], float | None]]] = (
    ("serving", "1 while the engine takes new requests", lambda e: e.said.accepts),
    ("num_requests_running", "Its requests holding KV blocks", lambda e: e.said.num_running),
    ("num_requests_waiting", "Its requests not yet started", lambda e: e.said.num_waiting),
    ("kv_cache_usage_perc", "Its KV blocks in use, 0 to 1", lambda e: _kv_usage(e.said)),
    (
        "tokens_per_second",
        "Tokens computed, running mean; 0 without a running request",
        # The engine keeps its mean while it is idle, to predict waits with it.
        lambda e: e.said.tokens_per_s if e.said.num_running else 0.0,
    ),
    (
        "least_slack_seconds",
        "The tightest TBT objective there minus the gap that one stream more would bring",
        lambda e: _slack_s(e.said),
    ),
    (
        "token_budget",
        "Most tokens of its last iteration",
        lambda e: None if e.last is None else e.last.token_budget,
    ),
    (
        "starts_held_back",
        "1 while its requests wait as one more decode would miss the objective",
        lambda e: None if e.last is None else e.last.holds_starts,
    ),
)


class EngineMetrics(Collector):
    """Metrics with the label `engine`; none for a lone replica, which never calls `show`."""

    def __init__(self, labels: Mapping[str, str], registry: CollectorRegistry) -> None:
        self._labels = dict(labels)
        self._engines: Sequence[_Engine] = ()
        self._totals: FrontEngines | None = None
        registry.register(self)

    def show(
        self,
        engines: FrontEngines,
        last: Mapping[str, IterationRecord],
        missed: Mapping[str, Counter[Cause]],
    ) -> None:
        """last: newest iteration by engine. missed: gaps by engine and cause."""
        self._totals = engines
        self._engines = [
            _Engine(said, last.get(said.engine_id), missed.get(said.engine_id, {}))
            for said in engines.published
        ]

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """All families, also without samples: the README's table is made from them."""
        model = list(self._labels.values())
        names = [*self._labels, "engine"]
        for name, text, read in _GAUGES:
            gauge = GaugeMetricFamily(f"legato_engine_{name}", text, labels=names)
            for engine in self._engines:
                value = read(engine)
                if value is not None:
                    gauge.add_metric([*model, engine.said.engine_id], float(value))
            yield gauge
        missed = CounterMetricFamily(
            "legato_engine_tbt_objective_missed",
            "Gaps of its streams above their TBT objective, by cause",
            labels=[*names, "cause"],
        )
        for engine in self._engines:
            for cause in Cause:  # from 0 on: Prometheus sees no increase in a first count
                count = engine.missed.get(cause, 0)
                missed.add_metric([*model, engine.said.engine_id, cause.value], count)
        yield missed
        moves = CounterMetricFamily(
            "legato_stream_moves", "Streams moved to another engine", labels=list(self._labels)
        )
        lost = CounterMetricFamily(
            "legato_engines_lost", "Engines that died or fell silent", labels=list(self._labels)
        )
        if self._totals is not None:
            moves.add_metric(model, self._totals.num_moves)
            lost.add_metric(model, self._totals.num_lost)
        yield moves
        yield lost


def occupancy(published: Sequence[Published]) -> tuple[int, int, float]:
    """(running, waiting, share of the KV blocks in use) of all engines together."""
    num_blocks = sum(said.num_blocks for said in published)
    num_free = sum(said.num_free_blocks for said in published)
    return (
        sum(said.num_running for said in published),
        sum(said.num_waiting for said in published),
        1.0 - num_free / num_blocks if num_blocks else 0.0,
    )
