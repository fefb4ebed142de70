"""Python's garbage collector, kept out of the way of tokens."""

from __future__ import annotations

import gc

# Iterations leave next to no cycles behind: reference counts free what they make.
_YOUNG_OBJECTS = 20_000


def keep_collector_quiet() -> None:
    """Call once everything that lives as long as the process is there.

    A full collection walks all of torch's and Ray's objects, 0.1 s and more, in the middle of
    somebody's stream; frozen objects are not walked. Young ones are looked at less often, because
    the collector too runs on cold caches.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, *gc.get_threshold()[1:])
