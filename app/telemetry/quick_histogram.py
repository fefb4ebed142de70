"""A histogram for what comes with every token or iteration.

prometheus_client's own takes a lock and walks its buckets in Python at each observation, which at
some thousand tokens a second is a good part of what a token costs outside the model.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class QuickHistogram(Collector):
    """Counts by bisection; becomes a Prometheus family when somebody reads. For one thread."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Mapping[str, str],
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        """buckets: ascending upper bounds, each within its bucket; infinity is added."""
        self._name = name
        self._text = text
        self._labels = dict(labels)
        self._bounds = [*buckets, math.inf]
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        registry.register(self)

    def observe_all(self, values: Sequence[float]) -> None:
        """Count these."""
        counts, bounds = self._counts, self._bounds
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        self._sum += sum(values)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """The family as Prometheus wants it: each bucket with all below it."""
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip(self._bounds, self._counts, strict=True):
            total += count
            bound_text = floatToGoString(bound)  # type: ignore[no-untyped-call]
            buckets.append((bound_text, total))
        family.add_metric(list(self._labels.values()), buckets, self._sum)
        yield family
