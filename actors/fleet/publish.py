"""An engine's publications: snapshots, and updates of its prefix cache, made from its core."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from actors.fleet.snapshot import (
    BitClass,
    EngineSnapshot,
    EngineState,
    Outlook,
    OutlookPoint,
    PrefixUpdate,
    Role,
    short_digests,
)
from actors.scheduling.admission.predictive import Forecast, PredictiveAdmission
from actors.scheduling.cost.mix import Mix
from actors.scheduling.cost.online import OnlineCostModel
from actors.scheduling.request import Request, SamplingParams

if TYPE_CHECKING:
    from actors.scheduling.core import Core

# Prompt lengths at which the prediction is sampled; it is not linear once steps or slots are full.
KNOTS = (1, 256, 1024, 4096, 16384)
ASKING = -1  # id of a probe; no request has it
MORE_STREAMS = 8  # the cost of one more stream is averaged over this many


class Publisher:
    """Builds the snapshots of one engine from its core, which it only reads. adapters, role:
    as in `EngineSnapshot`."""

    def __init__(
        self,
        engine_id: str,
        bits: BitClass,
        core: Core,
        adapters: tuple[tuple[int, str], ...] = (),
        role: Role = Role.BOTH,
    ) -> None:
        self.engine_id = engine_id
        self.bits = bits
        self.adapters = adapters
        self.role = role
        self._core = core
        self._sequence = 0
        self._probes = tuple(_probe(num_tokens) for num_tokens in KNOTS)
        self._shadow: PredictiveAdmission | None = None  # only predicts, see `_admission`
        self._shadow_config: object = None  # the settings it was built from

    def snapshot(
        self,
        now_s: float,
        state: EngineState = EngineState.SERVING,
        num_received: int = 0,
        predict: bool = True,
    ) -> EngineSnapshot:
        """The engine at this time.

        num_received: of one front, see `EngineSnapshot`; `dataclasses.replace` adapts the snapshot
        to other fronts. predict: False leaves out the outlook, which takes most of the time and
        which only some routers read.
        """
        self._sequence += 1
        config, engine = self._core.config, self._core.view
        decoding, prefilling = engine.decoding, engine.prefilling
        unfinished = sum([v.num_tokens - v.num_computed_tokens for v in prefilling])
        left = sum([v.max_length - v.num_tokens for v in decoding])
        left += sum([v.max_length - v.num_tokens for v in prefilling])
        outlook, least_slack_s = self._outlook(now_s) if predict else (Outlook(), math.inf)
        return EngineSnapshot(
            engine_id=self.engine_id,
            bits=self.bits,
            state=state,
            sequence=self._sequence,
            num_received=num_received,
            num_running=len(decoding) + len(prefilling),
            num_waiting=engine.num_waiting,
            num_prefill_tokens=engine.num_waiting_tokens - engine.num_shared_tokens + unfinished,
            num_decode_tokens=sum([v.num_tokens for v in decoding]),
            num_output_tokens_left=left,
            num_prefilled_tokens=self._core.num_prefilled_tokens,
            tokens_per_s=engine.tokens_per_s,
            least_slack_s=least_slack_s,
            num_blocks=engine.num_blocks,
            num_free_blocks=engine.num_free_blocks,
            block_size=engine.block_size,
            max_requests=config.max_requests,
            max_model_len=config.max_model_len,
            tbt_s=config.tbt_s,
            ttft_s=config.ttft_s,
            outlook=outlook,
            adapters=self.adapters,
            role=self.role,
            caches_prefixes=config.prefix_cache,
            num_saved_states=config.num_saved_states,
            shares_kv=config.tier_shared,
        )

    def prefix_update(self) -> PrefixUpdate | None:
        """Changes of the prefix cache since the last call, for all fronts; None if none."""
        whole, added, removed = self._core.prefix_cache.pop_changes()
        if not (whole or added or removed):
            return None
        return PrefixUpdate(self.engine_id, short_digests(added), short_digests(removed), whole)

    def prefixes(self) -> PrefixUpdate:
        """The full content of the prefix cache, for a front that has just connected."""
        held = self._core.prefix_cache.findable()
        return PrefixUpdate(self.engine_id, short_digests(held), whole=True)

    def _outlook(self, now_s: float) -> tuple[Outlook, float]:
        """The outlook, and the least slack in seconds with one more stream."""
        admission = self._admission()
        if admission is None:
            return Outlook(), math.inf
        engine, predictor = self._core.view, admission.predictor
        most = self._core.config.max_model_len
        there = predictor.situation(engine, now_s)
        points = []
        for probe in self._probes:
            num_tokens = len(probe.prompt)
            found = admission.forecast(probe, engine, now_s, there)
            points.append(OutlookPoint(num_tokens, found.expected_s, _promised_s(found, admission)))
            if num_tokens >= most:
                break
        tbt_s = predictor.tbt_bound_s(engine, 0)
        profile = predictor.cost.profile
        stages = profile.num_stages
        running = len(engine.decoding) + len(engine.prefilling)
        held = sum([v.num_tokens for v in engine.decoding])
        held += sum([v.num_tokens for v in engine.prefilling])
        now = Mix(-(-(running + 1) // stages), held // stages)
        more = Mix(-(-(running + 1 + stages * MORE_STREAMS) // stages), held // stages)
        factor = predictor.cost.bound_factor(now)
        per_stream_s = (profile.latency_s(more) - profile.latency_s(now)) * factor
        outlook = Outlook(
            tuple(points),
            tbt_s,
            per_stream_s / (MORE_STREAMS * stages),
            profile.decode_kv_s * factor,
            predictor.light_rate(engine),
            predictor.decode_share(engine),
            predictor.tbt_bound_s(engine, 0, running),
        )
        tightest_s = predictor.tightest_s(engine)
        return outlook, math.inf if tightest_s is None else tightest_s - tbt_s

    def _admission(self) -> PredictiveAdmission | None:
        """The engine's own admission if it predicts, else one that is used for predictions only."""
        limits = self._core.limits
        if isinstance(limits.admission, PredictiveAdmission):
            return limits.admission
        if not isinstance(limits.cost, OnlineCostModel):
            return None
        if self._shadow_config is not limits.config:
            self._shadow_config = limits.config
            self._shadow = PredictiveAdmission.build(
                limits.config, limits.cost, max_wait_s=math.inf
            )
        return self._shadow


def _promised_s(found: Forecast, admission: PredictiveAdmission) -> float:
    """The tightest objective that the forecast keeps."""
    return found.expected_s if found.alone else found.bound_s / (1.0 - admission.margin)


def _probe(num_tokens: int) -> Request:
    return Request(ASKING, (0,) * num_tokens, SamplingParams(1), 0.0)
