"""Sizes hypothesis for a suite of minutes, and for `--quick`.

LEGATO_HYPOTHESIS=thorough runs many more examples; =explore stops at the first failure found.
"""

import os

from hypothesis import HealthCheck, Phase, settings

_quiet = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}
settings.register_profile("quick", max_examples=20, stateful_step_count=25, **_quiet)
settings.register_profile("whole", max_examples=100, stateful_step_count=50, **_quiet)
settings.register_profile("thorough", max_examples=3000, stateful_step_count=80, **_quiet)
settings.register_profile(
    "explore", max_examples=3000, stateful_step_count=60, phases=[Phase.generate], **_quiet
)
settings.load_profile(os.environ.get("LEGATO_HYPOTHESIS", "whole"))
