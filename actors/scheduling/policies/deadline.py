"""Least slack first over each request's objectives (Niyama / QoServe), on stall-free batches.

Decodes first, as their next token is nearest; then the prompts whose first token is due soonest.
What can no longer be met is relegated behind what can (see `orders.deadline`).
"""

from __future__ import annotations

from actors.scheduling.policies.sarathi import Sarathi


class Deadline(Sarathi):
    order = "deadline"
