"""The status of a fleet for the console and `legato status`."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from app.fleet.connection import Connection, FleetRequest

_MOST_MOVES = 64  # remembered
_ADDED_UP = (
    "num_waiting",
    "num_waiting_tokens",
    "num_decoding",
    "num_prefilling",
    "num_finishing",
    "num_in_flight",
    "num_steps",
    "num_forced_steps",
    "num_blocks",
    "num_free_blocks",
    "num_cached_blocks",
    "num_evictions",
    "num_preemptions",
    "num_swaps",
    "num_free_host_blocks",
    "num_tier_blocks",
    "num_saved_blocks",
    "num_fetched_blocks",
    "num_direct_blocks",
    "num_early_blocks",
    "tokens_per_s",
    "recoveries",
)


class StreamMoves:
    """Moves of streams whose engine died, left or was late, and hand-overs after a prompt."""

    def __init__(self) -> None:
        self.num_moves = 0
        self.num_inexact = 0
        self.num_losses = 0  # of engines
        self.num_balanced = 0  # of the moves: from engines that serve
        self.num_hand_overs = 0  # from engines that only compute prompts
        self._latest: deque[Mapping[str, Any]] = deque(maxlen=_MOST_MOVES)

    def note(self, fleet_request: FleetRequest, to: str, exact: bool) -> None:
        self.num_moves += 1
        self.num_inexact += not exact
        fleet_request.num_moves += 1
        fleet_request.last_move = {
            "time_s": time.time(),
            "from": fleet_request.last_engine_id,
            "to": to,
            "num_tokens": fleet_request.num_tokens,
            "exact": exact,
        }
        self._latest.append(fleet_request.last_move)

    def redirect(self, fleet_request: FleetRequest, to: str, exact: bool) -> None:
        """The engine that it moved to has refused it: the same move ends elsewhere."""
        if (move := fleet_request.last_move) is not None:
            self.num_inexact += move["exact"] - exact
            move |= {"to": to, "exact": exact}

    def to_dict(self) -> dict[str, Any]:
        return {
            "num_moves": self.num_moves,
            "num_inexact_moves": self.num_inexact,
            "num_engines_lost": self.num_losses,
            "num_balanced": self.num_balanced,
            "num_hand_overs": self.num_hand_overs,
            "latest_moves": list(self._latest),
        }


def overview(answers: Mapping[Connection, Mapping[str, Any]], moves: StreamMoves) -> dict[str, Any]:
    """The engines' answers combined: sums of counts, settings of the first, a row per engine."""
    found = list(answers.values())
    total = dict(found[0])
    for name in _ADDED_UP:
        total[name] = sum(answer.get(name, 0) for answer in found)
    total["rebuilding"] = any(answer.get("rebuilding") for answer in found)
    starting = any(answer.get("standby") == "starting" for answer in found)
    total["standby"] = "starting" if starting else total.get("standby")
    total["stage_pids"] = [ranks for answer in found for ranks in answer.get("stage_pids", [])]
    engines = [_engine(connection, answer) for connection, answer in answers.items()]
    return {**total, "engines": engines, "fleet": moves.to_dict()}


def _engine(connection: Connection, answer: Mapping[str, Any]) -> dict[str, Any]:
    """pid: of its scheduler; replica_pid: of its owner. num_streams_here: streams of this front."""
    snapshot = connection.snapshot
    shown: dict[str, Any] = {
        "id": connection.engine_id,
        "node": connection.entry.node,
        "pid": answer.get("pid"),
        "replica_pid": connection.entry.pid,
        "num_streams_here": len(connection.open_requests),
    }
    if snapshot is not None:
        slack_s = snapshot.least_slack_s
        shown |= {
            "state": snapshot.state.value,
            "role": snapshot.role.value,
            "num_running": snapshot.num_running,
            "num_waiting": snapshot.num_waiting,
            "num_blocks": snapshot.num_blocks,
            "num_free_blocks": snapshot.num_free_blocks,
            # A mean over steps, which stays as it was while none is run.
            "tokens_per_s": snapshot.tokens_per_s if snapshot.num_running else 0.0,
            "least_slack_s": None if math.isinf(slack_s) else slack_s,
            "step_budget": answer.get("step_budget"),
            "prefill_rate": snapshot.outlook.prefill_rate,
        }
    return shown
