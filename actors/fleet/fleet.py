"""A front's view of its engines: their last snapshots, and the requests sent to them since.

Routing and moves read nothing else. Only its owner's calls change it, so that equal calls give
equal views, live and simulated.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from actors.fleet.prefixes import PrefixIndex
from actors.fleet.snapshot import Arrival, EngineSnapshot, PrefixUpdate

PATIENCE_S = 10.0  # TTFT limit of requests without an objective, as in admission
MOST_SESSIONS = 100_000  # conversations remembered; the least recent is dropped first


@dataclass(slots=True)
class FleetEngine:
    """One engine of the fleet.

    sent: (number, tokens to compute, context tokens) of what was sent and is not in the snapshot.
    num_sent: requests sent to it since the connection began, as `num_received` counts them.
    last_sent: number of the last one among those sent to any engine; 0: none was.
    """

    snapshot: EngineSnapshot
    sent: deque[tuple[int, int, int]] = field(default_factory=deque)
    num_sent: int = 0
    last_sent: int = 0
    sent_prefill_tokens: int = 0
    sent_tokens: int = 0

    @property
    def engine_id(self) -> str:
        return self.snapshot.engine_id

    @property
    def longest(self) -> int:
        """Maximum sequence length there, in tokens."""
        snapshot = self.snapshot
        return min(snapshot.max_model_len, snapshot.num_blocks * snapshot.block_size)

    @property
    def num_live(self) -> int:
        """Requests that run or wait there, including those sent but not yet received."""
        return self.snapshot.num_running + self.snapshot.num_waiting + len(self.sent)

    @property
    def num_prefill_tokens(self) -> int:
        """Known tokens still to compute there, including those of requests not yet received."""
        return self.snapshot.num_prefill_tokens + self.sent_prefill_tokens

    def kept_of(self, prefix: Sequence[bytes]) -> Sequence[bytes]:
        """Of these blocks of a request, those behind which others can begin once it is computed."""
        if not self.snapshot.caches_prefixes:
            return ()
        return prefix if self.snapshot.num_saved_states is None else prefix[-1:]

    @property
    def most_kept(self) -> int:
        """Of such blocks, how many it has room for."""
        num_states = self.snapshot.num_saved_states
        return self.snapshot.num_blocks if num_states is None else num_states

    def update(self, snapshot: EngineSnapshot) -> None:
        if snapshot.sequence <= self.snapshot.sequence:
            return
        self.snapshot = snapshot
        sent = self.sent
        while sent and sent[0][0] <= snapshot.num_received:
            _, num_new, num_tokens = sent.popleft()
            self.sent_prefill_tokens -= num_new
            self.sent_tokens -= num_tokens

    def note_sent(self, num_new: int, num_tokens: int) -> None:
        self.num_sent += 1
        self.sent.append((self.num_sent, num_new, num_tokens))
        self.sent_prefill_tokens += num_new
        self.sent_tokens += num_tokens

    def note_not_sent(self) -> None:
        self.num_sent -= 1
        _, num_new, num_tokens = self.sent.pop()
        self.sent_prefill_tokens -= num_new
        self.sent_tokens -= num_tokens


@dataclass(frozen=True, slots=True)
class Prospect:
    """Predictions for an arrival at one engine, in seconds; nan: the engine publishes none.

    num_cached_tokens: of the arrival's tokens, how many need not be computed there.
    num_new_tokens: the others.
    ttft_s, promised_s, tbt_s: as in `OutlookPoint` and `Outlook`.
    slack: what is left of the arrival's objectives, as a share of the one with least left; below 0
        admission there would refuse it.
    """

    engine_id: str
    num_cached_tokens: int
    num_new_tokens: int
    ttft_s: float = math.nan
    promised_s: float = math.nan
    tbt_s: float = math.nan
    slack: float = math.nan


class Fleet:
    """A front's view of all engines. Only `published`, `update_prefixes`, `sent`, `unsent`,
    `not_sent` and `lost` change it."""

    def __init__(self) -> None:
        self.engines: dict[str, FleetEngine] = {}  # by engine_id, in order of appearance
        self.prefixes = PrefixIndex()
        self._num_sent = 0  # to all engines
        self._sessions: OrderedDict[str, tuple[str, int]] = OrderedDict()  # engine, tokens there

    # ---- changes ----------------------------------------------------------------------

    def published(self, snapshot: EngineSnapshot) -> None:
        """Record a snapshot; an engine's first adds it. Outdated snapshots are dropped."""
        engine = self.engines.get(snapshot.engine_id)
        if engine is None:
            self.engines[snapshot.engine_id] = FleetEngine(snapshot)
            if snapshot.num_saved_states is not None:
                self.prefixes.holds_states(snapshot.engine_id)
        else:
            engine.update(snapshot)

    def update_prefixes(self, update: PrefixUpdate) -> None:
        """Record a change of an engine's prefix cache; ignored for unknown engines."""
        if update.engine_id in self.engines:
            self.prefixes.apply(update)

    def sent(self, engine_id: str, arrival: Arrival) -> int:
        """Record that the arrival was sent to this engine; returns its tokens cached there."""
        engine = self.engines[engine_id]
        cached = self.num_cached_tokens(arrival).get(engine_id, 0)
        self._num_sent += 1
        engine.last_sent = self._num_sent
        engine.note_sent(arrival.num_tokens - cached, arrival.num_tokens)
        self.prefixes.expect(engine_id, engine.kept_of(arrival.prefix), engine.most_kept)
        if arrival.session:
            self._sessions[arrival.session] = (engine_id, arrival.num_tokens)
            self._sessions.move_to_end(arrival.session)
            if len(self._sessions) > MOST_SESSIONS:
                self._sessions.popitem(last=False)
        return cached

    def unsent(self, engine_id: str, prefix: Sequence[bytes]) -> None:
        """Record that a request of this prefix was refused there, or has left before it began."""
        engine = self.engines.get(engine_id)
        if engine is not None:
            self.prefixes.retract(engine_id, engine.kept_of(prefix))

    def not_sent(self, engine_id: str, number: int) -> None:
        """Record that so many requests counted as sent there could not be sent. If others have been
        counted since, the sums are theirs once the engine has received them."""
        for _ in range(number):
            self.engines[engine_id].note_not_sent()

    def lost(self, engine_id: str) -> None:
        """Remove an engine that died or left."""
        self.engines.pop(engine_id, None)
        self.prefixes.forget(engine_id)

    # ---- reads ------------------------------------------------------------------------

    @property
    def longest(self) -> int:
        """Maximum sequence length at the engine that serves the longest ones; while none serves, of
        those that are here (0: none is)."""
        serving = [e.longest for e in self.engines.values() if e.snapshot.accepts]
        return max(serving or [e.longest for e in self.engines.values()], default=0)

    def candidates(self, arrival: Arrival) -> list[FleetEngine]:
        """Engines that may take it: serving, with the bit class and the adapter it needs.

        Engines whose context is too short are left out unless all are: then one of them must get
        the request, to refuse it with the reason.
        """
        asked = [
            engine
            for engine in self.engines.values()
            if (snapshot := engine.snapshot).accepts
            and (arrival.bits is None or arrival.bits == snapshot.bits)
            and snapshot.engine_id not in arrival.refused_by
            and (arrival.adapter is None or arrival.adapter in snapshot.adapters)
        ]
        longest = arrival.num_tokens + 1
        return [engine for engine in asked if longest <= engine.longest] or asked

    def num_cached_tokens(self, arrival: Arrival) -> dict[str, int]:
        """Engine -> cached tokens of the arrival; the last token is always computed."""
        most = max(arrival.num_tokens - 1, 0)
        if arrival.prefix:
            return {
                engine_id: min(blocks * engine.snapshot.block_size, most)
                for engine_id, blocks in self.prefixes.hits(arrival.prefix).items()
                if (engine := self.engines.get(engine_id)) is not None
            }
        engine_id, num_tokens = self._sessions.get(arrival.session, ("", 0))
        return {engine_id: min(num_tokens, most)} if engine_id in self.engines else {}

    def prospects(self, arrival: Arrival, engines: Iterable[FleetEngine]) -> list[Prospect]:
        """Predictions for the arrival at each of these engines."""
        cached = self.num_cached_tokens(arrival)
        return [prospect(engine, arrival, cached.get(engine.engine_id, 0)) for engine in engines]


def prospect(engine: FleetEngine, arrival: Arrival, num_cached_tokens: int = 0) -> Prospect:
    """Predictions for the arrival at an engine that holds this many of its tokens."""
    snapshot = engine.snapshot
    num_new = arrival.num_tokens - num_cached_tokens
    ttft_s, promised_s = snapshot.outlook.at(engine.sent_prefill_tokens + num_new)
    if math.isnan(ttft_s):
        if snapshot.tokens_per_s > 0:
            ttft_s = (engine.num_prefill_tokens + num_new) / snapshot.tokens_per_s
        return Prospect(snapshot.engine_id, num_cached_tokens, num_new, ttft_s)
    context = engine.sent_tokens + arrival.num_tokens
    tbt_s = snapshot.outlook.tbt_with_s(context, len(engine.sent))
    wanted_s = arrival.objective.ttft_s or snapshot.ttft_s or PATIENCE_S
    slack = 1.0 - promised_s / wanted_s
    if wanted_tbt_s := arrival.objective.tbt_s or snapshot.tbt_s:
        slack = min(slack, 1.0 - tbt_s / wanted_tbt_s)
    return Prospect(
        snapshot.engine_id, num_cached_tokens, num_new, ttft_s, promised_s, tbt_s, slack
    )
