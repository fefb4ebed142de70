"""Fleets to decide about, drawn by hypothesis and built by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from actors.fleet.fleet import Fleet
from actors.fleet.scaling.base import EngineLoad
from actors.fleet.snapshot import (
    Arrival,
    BitClass,
    EngineSnapshot,
    EngineState,
    Outlook,
    OutlookPoint,
)
from actors.scheduling.request import Objective

BITS = BitClass("m@1", "bfloat16", "cpu", "avx512_bf16")
OTHER_BITS = replace(BITS, instruction_set="avx2")


def outlook(rate: float = 1000.0, begin_s: float = 0.1) -> Outlook:
    """A first token after begin_s and num_tokens / rate; promised at twice that."""
    ends_s = [(n, begin_s + n / rate) for n in (0, 10_000)]
    points = tuple([OutlookPoint(n, s, 2 * s) for n, s in ends_s])
    return Outlook(points, tbt_s=0.05, tbt_per_stream_s=0.001, prefill_rate=rate)


def snapshot(name: str, **changes: Any) -> EngineSnapshot:
    """An idle engine of 10,000 tokens; `changes` are fields of it."""
    base = EngineSnapshot(
        name, BITS, EngineState.SERVING, 1, num_blocks=625, num_free_blocks=625, block_size=16,
        max_requests=64, max_model_len=8192, tbt_s=0.1, ttft_s=1.0, outlook=outlook(),
    )  # fmt: skip
    return replace(base, **changes)


def fleet_of(*snapshots: EngineSnapshot) -> Fleet:
    fleet = Fleet()
    for one in snapshots:
        fleet.published(one)
    return fleet


def load(**changes: float) -> EngineLoad:
    """A serving engine with nothing to do; `changes` are fields of it."""
    base = EngineLoad(
        time_s=0.0, num_running=0, num_waiting=0, prefilled_tokens=0, prefill_tokens=0,
        prefill_rate=1000.0, decode_share=0.0, promised_s=0.5, slack_share=0.5, ttft_s=1.0,
        used_places=0.0, accepts=1.0,
    )  # fmt: skip
    return replace(base, **changes)


DIGESTS = [bytes([n] * 8) for n in range(12)]

snapshots = st.builds(
    lambda state, bits, running, waiting, prefill, rate, predicts: snapshot(
        "", state=state, bits=bits, num_running=running, num_waiting=waiting,
        num_prefill_tokens=prefill, tokens_per_s=rate,
        outlook=outlook(rate) if predicts else Outlook(),
    ),
    st.sampled_from(EngineState),
    st.sampled_from((BITS, OTHER_BITS)),
    st.integers(0, 64),
    st.integers(0, 200),
    st.integers(0, 50_000),
    st.floats(100.0, 10_000.0),
    st.booleans(),
)  # fmt: skip

arrivals = st.builds(
    lambda tokens, left, tbt_s, ttft_s, prefix, session, bits: Arrival(
        tokens, left, Objective(tbt_s, ttft_s), tuple(DIGESTS[: min(prefix, tokens // 16)]),
        session, bits=bits,
    ),
    st.integers(1, 12_000),
    st.integers(1, 500),
    st.none() | st.floats(0.01, 1.0),
    st.none() | st.floats(0.01, 20.0),
    st.integers(0, len(DIGESTS)),
    st.sampled_from(("", "a", "b")),
    st.sampled_from((None, BITS, OTHER_BITS)),
)  # fmt: skip


@st.composite
def fleets(draw: st.DrawFn, least: int = 0) -> Fleet:
    """Up to six engines in any state, some of them lost, some with requests on their way."""
    drawn = draw(st.lists(snapshots, min_size=least, max_size=6))
    fleet = fleet_of(*[replace(s, engine_id=f"engine-{i}") for i, s in enumerate(drawn)])
    for name in list(fleet.engines):
        for arrival in draw(st.lists(arrivals, max_size=3)):
            fleet.sent(name, arrival)
    for name in draw(st.sets(st.sampled_from(list(fleet.engines)))) if fleet.engines else ():
        fleet.lost(name)
    return fleet
