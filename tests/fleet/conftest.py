"""Hypothesis is sized as for the scheduling tests."""

import tests.scheduling.conftest  # noqa: F401  # loads its profile
