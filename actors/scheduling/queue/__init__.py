"""The waiting requests and their order.

An order is a class that takes `(config, **options)`, and one row of `ORDERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.queue.ageing import FirstComeFirstServed, PriorityWithAgeing, ShortestOutput
from actors.scheduling.queue.deadline import EarliestDeadline
from actors.scheduling.queue.fair import VirtualTokenCounter
from actors.scheduling.queue.mlfq import FeedbackLevels
from actors.scheduling.queue.order import Order
from actors.scheduling.queue.yielding import YieldingOrder
from actors.scheduling.registry import build_part

__all__ = ["ORDERS", "Order", "build_order"]

ORDERS: Mapping[str, Callable[..., Order]] = {
    "fcfs": FirstComeFirstServed,
    "priority": PriorityWithAgeing,
    "shortest": ShortestOutput,
    "deadline": EarliestDeadline,
    "fair": VirtualTokenCounter,
    "mlfq": FeedbackLevels,
}
_TWICE = ("deadline", "fair")  # see `YieldingOrder`


def build_order(name: str, config: SchedulerConfig) -> Order:
    """The named order with `config.order_options`; raises ConfigError for a bad name or option."""

    def build() -> Order:
        return build_part("order", name, ORDERS, config.order_options, config)

    return YieldingOrder(build(), build()) if name in _TWICE else build()
