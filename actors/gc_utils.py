"""Python's garbage collector, kept out of the way of tokens."""

from __future__ import annotations

import gc


def keep_collector_quiet() -> None:
    """Call once everything that lives as long as the process is there.

    A full collection walks all of torch's and Ray's objects, 0.14 s were measured, in the middle of
    somebody's stream; frozen objects are not walked.
    """
    gc.collect()
    gc.freeze()
