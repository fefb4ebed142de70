"""Fair sharing between tenants (Sheng et al., OSDI '24) on stall-free batches.

Who starts next is decided by virtual token counters (see `orders.fair` for the bound); how a step
is filled is Sarathi's.
"""

from __future__ import annotations

from actors.scheduling.policies.sarathi import Sarathi


class Fair(Sarathi):
    order = "fair"
