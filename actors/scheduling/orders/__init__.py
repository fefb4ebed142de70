"""Orders of the waiting queue, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from actors.scheduling.config import ConfigError, SchedulerConfig
from actors.scheduling.orders.base import Order
from actors.scheduling.orders.deadline import EarliestDeadline
from actors.scheduling.orders.fair import VirtualTokenCounter
from actors.scheduling.orders.heap import FirstComeFirstServed, PriorityWithAgeing, ShortestFirst
from actors.scheduling.orders.levels import FeedbackLevels

ORDERS: Mapping[str, Callable[..., Order]] = {
    "fcfs": FirstComeFirstServed,
    "priority": PriorityWithAgeing,
    "shortest": ShortestFirst,
    "deadline": EarliestDeadline,
    "fair": VirtualTokenCounter,
    "mlfq": FeedbackLevels,
}


def build_order(name: str, config: SchedulerConfig) -> Order:
    """The named order with `config.order_options`; raises ConfigError for a bad name or option."""
    if name not in ORDERS:
        known = ", ".join(sorted(("auto", *ORDERS)))
        raise ConfigError("order", f"unknown {name!r}; known: {known}")
    try:
        return ORDERS[name](config, **config.order_options)
    except TypeError as error:
        raise ConfigError("order_options", str(error)) from error
