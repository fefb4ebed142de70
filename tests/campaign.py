"""How long a campaign runs: a sample in every run of the suite, the whole of it on request."""

from __future__ import annotations

import os


def size(sample: int, whole: int) -> int:
    """`LEGATO_CAMPAIGNS=1 pytest ...` runs the whole."""
    return whole if os.environ.get("LEGATO_CAMPAIGNS") else sample
