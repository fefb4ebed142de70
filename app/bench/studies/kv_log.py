"""KV that moved between live engines, as their event logs tell it.

A log holds each move's beginning and answer (`telemetry.events`), and the clocks of one machine's
engines are one clock, so a stream can be followed from the engine that computed its prompt to the
engine that continues it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from actors.engine.event_recorder import read_events
from actors.scheduling.event_log import Row, config_of, from_row
from actors.scheduling.events import ClearTier, Emit, Execute, Fetch, KVMove, Moved, Submit
from actors.scheduling.state import prefix_digests
from app.bench.report import MeasurementError
from app.simulate.hardware.interconnect import Interconnect


def read_rows(folder: Path) -> list[Row]:
    """All rows of one engine's log."""
    logs = sorted(folder.rglob("events-*-0001.parquet"))
    return [row for log in logs for row in read_events(log)]


@dataclass(frozen=True, slots=True)
class Move:
    """One move between an engine and the tier. num_blocks: that it moved, not that it tried to."""

    is_fetch: bool
    num_blocks: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Continued:
    """A stream that one engine began and another continued.

    first_s: its first engine emitted its last token there. arrived_s: the second engine got it.
    fetched_s: its KV was there; None: nothing was fetched. begun_s: its first step there was
    planned. next_s: the next token was emitted. num_tokens: known as it moved. num_fetched: blocks,
    num_early of them before it arrived.
    """

    num_tokens: int
    num_fetched: int
    num_early: int
    first_s: float
    arrived_s: float
    fetched_s: float | None
    begun_s: float
    next_s: float

    def parts_ms(self) -> dict[str, float]:
        """The parts of the pause, in the order in which they pass."""
        ready_s = self.fetched_s or self.arrived_s
        return {
            "handed_over": 1e3 * (self.arrived_s - self.first_s),
            "fetched": 1e3 * (ready_s - self.arrived_s),
            "planned": 1e3 * (self.begun_s - ready_s),
            "computed": 1e3 * (self.next_s - self.begun_s),
        }


@dataclass(slots=True)
class EngineLog:
    """What is read of one engine's log. Streams are known by their prompt's tokens."""

    moves: list[Move]
    last_s: dict[tuple[int, ...], float]  # of each prompt: when its last token here was emitted
    arrivals: dict[tuple[int, ...], Arrived]  # of streams begun elsewhere


@dataclass(slots=True)
class Arrived:
    """A stream on the engine that continues it; see `Continued`."""

    at_s: float
    num_tokens: int
    num_fetched: int = 0
    num_early: int = 0
    fetched_s: float | None = None
    begun_s: float | None = None
    next_s: float | None = None


def read_engine(rows: Iterable[Row]) -> EngineLog:
    found = EngineLog([], {}, {})
    prompts: dict[int, tuple[int, ...]] = {}
    arrived: dict[int, Arrived] = {}
    begun: dict[int, tuple[KVMove, float]] = {}
    by_digest: dict[bytes, Arrived] = {}  # of each block of a stream begun elsewhere
    early: set[bytes] = set()  # fetched before a stream asked for them
    block_size = 0
    for row in rows:
        if row["kind"] == "Config":
            block_size = config_of(row).block_size
            continue
        now_s, event, instructions = from_row(row)
        if isinstance(event, Submit):
            request = event.request
            prompts[request.request_id] = request.prompt
            if request.output:
                stream = Arrived(now_s, len(request.prompt) + len(request.output))
                arrived[request.request_id] = found.arrivals[request.prompt] = stream
                tokens = (*request.prompt, *request.output)
                digests = prefix_digests(tokens, block_size, request.cache_salt)
                by_digest |= dict.fromkeys(digests, stream)
                stream.num_early = stream.num_fetched = len(early.intersection(digests))
                early.difference_update(digests)
        elif isinstance(event, Moved):
            move, begin_s = begun.pop(event.move_id)
            if isinstance(move, ClearTier):
                continue
            is_fetch = isinstance(move, Fetch)
            found.moves.append(Move(is_fetch, event.num_blocks, begin_s, now_s))
            for number, (_, digest) in enumerate(move.blocks if is_fetch else ()):
                is_here, stream_here = number < event.num_blocks, by_digest.get(digest)
                if stream_here is not None:
                    stream_here.fetched_s = now_s
                    stream_here.num_fetched += is_here
                elif is_here:
                    early.add(digest)
        for instruction in instructions:
            if isinstance(instruction, KVMove):
                begun[instruction.move_id] = (instruction, now_s)
            elif isinstance(instruction, Execute):
                for piece in instruction.plan.slices:
                    stream_here = arrived.get(piece[0])
                    if stream_here is not None and stream_here.begun_s is None:
                        stream_here.begun_s = now_s
            elif isinstance(instruction, Emit):
                for output in instruction.outputs:
                    if output.tokens:
                        found.last_s[prompts[output.request_id]] = now_s
                        stream_here = arrived.get(output.request_id)
                        if stream_here is not None and stream_here.next_s is None:
                            stream_here.next_s = now_s
    return found


def continued(logs: Mapping[str, EngineLog]) -> list[Continued]:
    """The streams that moved, in order of their arrival; without those that did not go on."""
    found = []
    for log in logs.values():
        for prompt, there in log.arrivals.items():
            before = [
                other.last_s[prompt]
                for other in logs.values()
                if other is not log and other.last_s.get(prompt, there.at_s) < there.at_s
            ]
            if before and there.begun_s is not None and there.next_s is not None:
                found.append(
                    Continued(
                        there.num_tokens,
                        there.num_fetched,
                        there.num_early,
                        max(before),
                        there.at_s,
                        there.fetched_s,
                        there.begun_s,
                        there.next_s,
                    )
                )
    return sorted(found, key=lambda stream: stream.arrived_s)


def bytes_per_s(moves: Iterable[Move], block_bytes: float, *, is_fetch: bool) -> float:
    """Over the moves that did all or some of their work; 0.0 without any."""
    done = [move for move in moves if move.is_fetch is is_fetch and move.num_blocks]
    seconds = sum(move.end_s - move.begin_s for move in done)
    return sum(move.num_blocks for move in done) * block_bytes / seconds if seconds else 0.0


def measured_link(logs: Mapping[str, EngineLog], block_bytes: float) -> Interconnect:
    """What moved KV between these engines, for a simulation: latency is what passes before a fetch
    begins. Raises MeasurementError if nothing was fetched."""
    moves = [move for log in logs.values() for move in log.moves]
    rate = bytes_per_s(moves, block_bytes, is_fetch=True)
    if not rate:
        raise MeasurementError("no KV was fetched")
    waits_s = [stream.arrived_s - stream.first_s for stream in continued(logs)]
    return Interconnect("measured", rate, max(0.0, median(waits_s)))
