"""The interface of scaling policies, which choose the number of engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from actors.fleet.snapshot import EngineSnapshot


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The load of one engine: plain numbers, as Serve's controller passes them on.

    time_s: when the engine reported it, on a clock that all engines share.
    prefilled_tokens, prefill_tokens: computed since it began, and still to be computed.
    prefill_rate, decode_share: as in `Outlook`; 0.0: no prediction.
    promised_s: the tightest TTFT objective that it could keep for `MIDDLING_TOKENS`.
    slack_share: least slack with one stream more, as a share of the TBT objective (1.0: there is
        none, or a stream without any others would miss it as well).
    ttft_s: the deployment's objective; 0.0: none.
    used_places: share of the sequence slots or of the KV memory in use, whichever is more.
    accepts: 1.0 unless it starts or drains.
    """

    time_s: float
    num_running: float
    num_waiting: float
    prefilled_tokens: float
    prefill_tokens: float
    prefill_rate: float
    decode_share: float
    promised_s: float
    slack_share: float
    ttft_s: float
    used_places: float
    accepts: float

    def to_stats(self) -> dict[str, float]:
        """The report as Serve's `record_autoscaling_stats` takes it; inverse of `from_stats`."""
        return {f.name: float(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_stats(cls, stats: Mapping[str, float]) -> EngineLoad:
        """The report in these statistics; unknown keys are ignored. Raises KeyError for a missing
        one."""
        return cls(**{f.name: stats[f.name] for f in fields(cls)})


MIDDLING_TOKENS = 1024  # length of the prompt that `promised_s` is for


def load_of(snapshot: EngineSnapshot, now_s: float) -> EngineLoad:
    """The load in a snapshot taken at this time."""
    outlook = snapshot.outlook
    promised_s = outlook.at(MIDDLING_TOKENS)[1] if outlook.points else 0.0
    slack_share = 1.0
    can_be_kept = snapshot.least_slack_s + outlook.tbt_s >= outlook.lone_tbt_s
    if snapshot.tbt_s is not None and snapshot.least_slack_s < snapshot.tbt_s and can_be_kept:
        slack_share = snapshot.least_slack_s / snapshot.tbt_s
    used_blocks = 1.0 - snapshot.num_free_blocks / snapshot.num_blocks
    return EngineLoad(
        time_s=now_s,
        num_running=snapshot.num_running,
        num_waiting=snapshot.num_waiting,
        prefilled_tokens=snapshot.num_prefilled_tokens,
        prefill_tokens=snapshot.num_prefill_tokens,
        prefill_rate=outlook.prefill_rate,
        decode_share=outlook.decode_share,
        promised_s=promised_s,
        slack_share=slack_share,
        ttft_s=snapshot.ttft_s or 0.0,
        used_places=max(snapshot.num_running / snapshot.max_requests, used_blocks),
        accepts=float(snapshot.accepts),
    )


@dataclass(frozen=True, slots=True)
class Bounds:
    """Minimum and maximum number of engines. least 0: an idle fleet may end its last engine."""

    least: int = 1
    most: int = 16

    def __post_init__(self) -> None:
        """Check the bounds. Raises TypeError unless 0 <= least <= most and most >= 1."""
        if not 0 <= self.least <= self.most or self.most < 1:
            raise TypeError(f"need 0 <= least <= most and most >= 1, not {self.least}, {self.most}")

    def clamp(self, wanted: int) -> int:
        return max(self.least, min(self.most, wanted))


class Scaling(ABC):
    """Decides from the engines' reports and its own state; one per fleet, called often."""

    @abstractmethod
    def wanted(
        self,
        loads: Mapping[str, EngineLoad],
        num_starting: int,
        num_queued: int,
        now_s: float,
        bounds: Bounds,
    ) -> int:
        """The number of engines there should be.

        loads: by engine, draining ones included. num_starting: engines requested that do not
        serve yet. num_queued: requests that wait at fronts because no engine can take them.
        """


def serving(loads: Mapping[str, EngineLoad]) -> Sequence[EngineLoad]:
    """The engines that take new requests."""
    return [load for load in loads.values() if load.accepts]
