"""Which requests may enter, and when the head of the queue may start.

An admission is a class with `build(config, cost_model, **options)`, and one row of `ADMISSIONS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from actors.scheduling.admission.limits import AcceptAll
from actors.scheduling.admission.peak import PredictedPeak
from actors.scheduling.admission.predictive import PredictiveAdmission
from actors.scheduling.config import SchedulerConfig
from actors.scheduling.interfaces import Admission, StepTimePredictor
from actors.scheduling.registry import build_part, check_part

__all__ = ["ADMISSIONS", "build_admission", "check_admission"]

ADMISSIONS: Mapping[str, Callable[..., Admission]] = {
    "all": AcceptAll.build,
    "predicted_peak": PredictedPeak.build,
    "predictive": PredictiveAdmission.build,
}


def build_admission(config: SchedulerConfig, cost_model: StepTimePredictor | None) -> Admission:
    """The admission `config` names; raises ConfigError for what is unknown or impossible."""
    return build_part(
        "admission", config.admission, ADMISSIONS, config.admission_options, config, cost_model
    )


def check_admission(config: SchedulerConfig) -> None:
    """Raises ConfigError for a name or options that no cost model would mend."""
    check_part("admission", config.admission, ADMISSIONS, config.admission_options)
