"""Which admission a config gets, and how the predictive one learns from its predictions."""

from __future__ import annotations

import pytest

from actors.scheduling.admission import build_admission
from actors.scheduling.admission.peak import PredictedPeak
from actors.scheduling.admission.predictive import CAUTION, WATCHED, Correction
from actors.scheduling.config import ConfigError, SchedulerConfig


def test_bad_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="known: all, predicted_peak, predictive"):
        build_admission(SchedulerConfig(num_blocks=8, admission="maybe"), None)
    with pytest.raises(ConfigError, match="cost model"):
        build_admission(SchedulerConfig(num_blocks=8, admission="predictive"), None)
    options = {"reserve": 0.1, "speed": 1}
    with pytest.raises(ConfigError, match="speed"):
        build_admission(
            SchedulerConfig(num_blocks=8, admission="predicted_peak", admission_options=options),
            None,
        )
    built = build_admission(SchedulerConfig(num_blocks=8, admission="predicted_peak"), None)
    assert isinstance(built, PredictedPeak)


def test_a_correction_is_the_quantile_of_what_became_of_recent_predictions() -> None:
    correction = Correction(share=0.9)
    assert correction.factor == CAUTION  # this queue has not been watched
    for percent in range(100):
        correction.observe(actual_s=1.0 + percent / 100, predicted_s=1.0)
    assert correction.factor == pytest.approx(1.89)
    for _ in range(WATCHED):
        correction.observe(0.5, 1.0)
    assert correction.factor == pytest.approx(0.5)  # what was is forgotten
