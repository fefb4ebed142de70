"""What the streams of a run lose by moving: their pauses, and what is computed again."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.fleet.moves import OpenStream
from app.simulate.run.record import RunRecord
from app.simulate.run.replica import Replica


@dataclass(slots=True)
class MoveTotals:
    """The streams that moved after their first token. Of requests that had none yet nothing is
    counted: they wait elsewhere.

    num_copied: of them, those whose KV was copied before they moved.
    num_bytes: of KV fetched, that of copies that came to nothing included.
    busiest_link: share of the run that its transfers take.
    num_recomputed_tokens: known tokens that the next engine computed again.
    num_gaps_before: of the record's gaps, those before the first move.
    pauses_s: from the last token before a move to the next one.
    """

    num_streams: int
    num_copied: int
    num_bytes: float
    busiest_link: float
    num_recomputed_tokens: int
    num_gaps_before: int
    pauses_s: NDArray[np.float64]

    def to_dict(self) -> dict[str, Any]:
        pauses_s = self.pauses_s
        p50, p99 = np.quantile(pauses_s, (0.5, 0.99)) if len(pauses_s) else (0.0, 0.0)
        return {
            "num_streams": self.num_streams,
            "num_copied": self.num_copied,
            "num_bytes": self.num_bytes,
            "busiest_link": self.busiest_link,
            "num_recomputed_tokens": self.num_recomputed_tokens,
            "pause_p50_s": float(p50),
            "pause_p99_s": float(p99),
            "pause_max_s": float(pauses_s.max(initial=0.0)),
        }


class MovedStreams:
    """moves: (time, request), in order. Call `look` after each event of an engine."""

    def __init__(self, record: RunRecord) -> None:
        self.moves: list[tuple[float, int]] = []
        self.num_streams = self.num_copied = self.num_recomputed_tokens = 0
        self.pauses_s: list[float] = []
        self._record = record
        self._num_gaps_before = 0
        # Until the next token: how many there were, and when the last one came
        self._silent: dict[int, tuple[int, float]] = {}
        self._unstarted: set[int] = set()

    def left(self, stream: OpenStream, now_s: float) -> None:
        """It has left an engine, for another or for none yet."""
        request_id = stream.stream_id
        self.moves.append((now_s, request_id))
        if not stream.sensitive:
            return
        if not self.num_streams:
            self._num_gaps_before = len(self._record.gaps_s)
        self.num_streams += 1
        self._unstarted.add(request_id)
        record = self._record
        before = record.num_output_tokens[request_id], record.last_token_s[request_id]
        self._silent.setdefault(request_id, before)

    def watch(self, replica: Replica) -> None:
        """Follow what starts on an engine."""
        replica.on_start = partial(self._started, replica, replica.on_start)

    def _started(self, replica: Replica, then: Any, request_id: int, now_s: float) -> None:
        then(request_id, now_s)
        if request_id in self._unstarted:
            self._unstarted.discard(request_id)
            num_known = replica.core.live_requests[request_id].num_tokens
            first = next(start for r, start, *_ in replica.step if r == request_id)
            self.num_recomputed_tokens += num_known - 1 - first

    def look(self, replica: Replica) -> None:
        """Note which streams have their next token."""
        record = self._record
        for request_id in [r for r in self._silent if record.replica[r] == replica.index]:
            num_before, last_s = self._silent[request_id]
            if record.num_output_tokens[request_id] > num_before:
                del self._silent[request_id]
                self.pauses_s.append(record.last_token_s[request_id] - last_s)

    def totals(self, num_bytes: float = 0.0, busiest_s: float = 0.0) -> MoveTotals | None:
        """None: nothing moved. busiest_s: how long the busiest link was."""
        if not (self.num_streams or num_bytes):
            return None
        busiest_link = busiest_s / max(self._record.end_s, 1e-12)
        return MoveTotals(
            self.num_streams, self.num_copied, num_bytes, busiest_link,
            self.num_recomputed_tokens, self._num_gaps_before, np.array(self.pauses_s),
        )  # fmt: skip
