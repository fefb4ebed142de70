"""Orders of the waiting queue, by name; each is imported when it is first asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from actors.scheduling.orders.base import Order

if TYPE_CHECKING:
    from actors.scheduling.config import SchedulerConfig

ORDERS = {
    "fcfs": "heap:FirstComeFirstServed",
    "priority": "heap:PriorityWithAgeing",
    "shortest": "heap:ShortestFirst",
    "deadline": "deadline:EarliestDeadline",
    "fair": "fair:VirtualTokenCounter",
    "mlfq": "levels:FeedbackLevels",
}


def build_order(name: str, config: SchedulerConfig) -> Order:
    """The named order with `config.order_options`; raises ConfigError for a bad option."""
    from actors.scheduling.config import ConfigError

    module, _, attribute = ORDERS[name].partition(":")
    order_class = getattr(import_module(f"{__name__}.{module}"), attribute)
    try:
        order: Order = order_class(config, **config.order_options)
    except TypeError as error:
        raise ConfigError("order_options", str(error)) from error
    return order
