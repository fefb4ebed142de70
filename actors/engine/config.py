"""All that an engine needs to start: plain frozen data, resolved from the YAML."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from actors.scheduling.config import SchedulerConfig
from actors.stage.spec import BATCH_INVARIANT, StageInfo, StageSpec

logger = logging.getLogger(__name__)

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class KVMemory:
    """Memory of the paged KV cache, per rank.

    gib: exact; None takes `fraction` of what is available once the weights are loaded.
    swap_gib: host memory for preempted requests' blocks; 0 preempts by recompute only.
    host_cache_gib, disk_cache_gib: second tier of the prefix cache; 0 for none.
    disk_cache_path: where on disk; None: the user's cache folder.
    shared_cache_gib: the same in memory that the engines of a node share; 0 for none.
    shared_cache_path: in which folder; None: where the system keeps shared memory.
    between_nodes: whether other nodes fetch from there by TCP; None: if the cluster has several.
    direct_gib: memory of the device for blocks that go to other engines' devices; 0 for none.
    """

    gib: float | None = None
    fraction: float = 0.25
    swap_gib: float = 0.0
    host_cache_gib: float = 0.0
    disk_cache_gib: float = 0.0
    disk_cache_path: str | None = None
    shared_cache_gib: float = 0.0
    shared_cache_path: str | None = None
    between_nodes: bool | None = False
    direct_gib: float = 0.0

    @property
    def has_tier(self) -> bool:
        return max(self.host_cache_gib, self.disk_cache_gib, self.shared_cache_gib) > 0


class CacheSizes(NamedTuple):
    """num_requests: that may run at once, each with states where layers keep them."""

    num_blocks: int
    num_host_blocks: int
    num_requests: int


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """stage: template of every rank's spec (stage, rank and address are filled in later).

    scheduler: num_blocks is filled in once the stages have reported their memory.
    transport: "graph" (Ray compiled graph) or "call" (plain actor calls).
    accelerator: device type whose activations go from stage to stage without touching host memory
        ("cuda"), through the graph's accelerator transport; None uses shared memory.
    channel_bytes: buffer of one graph channel. A channel that grows leaks its old buffer, so it is
        sized for the largest activation up front.
    step_deadline_s: a step that takes longer than this and than `deadline_factor` times its
        prediction counts as hung: the stages are killed and rebuilt, and requests replayed.
    request_deadline_s: a request that takes longer ends with an error.
    whole_context: do not start where the KV cache holds no request of `max_model_len`; otherwise
        an engine that is alone lowers that to what it holds.
    drafts_if_exact: no drafts if the stages' backend turns out not to be batch-invariant.
    standby: keep processes that have imported everything for the next rebuild (on CPUs: Ray gives a
        GPU to one process).
    """

    stage: StageSpec
    scheduler: SchedulerConfig
    kv: KVMemory = field(default_factory=KVMemory)
    transport: str = "graph"
    accelerator: str | None = None
    channel_bytes: int = 1 << 20
    cpus_per_rank: float = 0.5
    gpus_per_rank: float = 0.0
    step_deadline_s: float = 20.0
    deadline_factor: float = 20.0
    request_deadline_s: float = 3600.0
    load_timeout_s: float = 1800.0
    grammars: bool = False  # load the grammar compiler at start, not in a step
    calibrate: bool = False  # measure a cost model at start if none is configured
    whole_context: bool = False
    drafts_if_exact: bool = False
    keeps_objective: bool = False  # even one out of reach: it has been in effect, or was set live
    is_rebuild: bool = False  # streams are waiting: skip optional preparation and checks
    event_log: str | None = None  # folder for every event and plan, as Parquet
    event_log_bytes: int = 1 << 30  # recording ends at this size
    adapters: tuple[tuple[int, str], ...] = ()  # (slot, folder)
    role: str = "both"  # of `actors.fleet.snapshot.Role`
    standby: bool = False
    max_rebuilds: int = 3  # in a row, without a successful step in between

    def with_changes(self, changes: Mapping[str, Any]) -> EngineConfig:
        """For the next scheduler, which starts with settings that were changed live."""
        scheduler = self.scheduler.with_changes(changes)
        keeps = self.keeps_objective or scheduler.tbt_s != self.scheduler.tbt_s
        return replace(self, scheduler=scheduler, keeps_objective=keeps)

    def with_objective(self, tbt_s: float | None) -> EngineConfig:
        """For the next scheduler, with the objective that this one follows: as configured, by rule,
        or in place of one out of reach."""
        scheduler = replace(self.scheduler, tbt_rule=None, tbt_s=tbt_s)
        return replace(self, scheduler=scheduler, keeps_objective=True)

    def scheduler_on(self, backend: str) -> SchedulerConfig:
        """The scheduler's settings for the backend that the stages have chosen."""
        if self.drafts_if_exact and backend not in BATCH_INVARIANT:
            return self.scheduler.without_drafts()
        return self.scheduler

    def cache_sizes(self, infos: Sequence[StageInfo], *, is_rebuild: bool = False) -> CacheSizes:
        """What fits every rank, by what the ranks report of their memory.

        Raises ValueError if `kv.memory_gib` does not fit a GPU, or a rank's part of one leaves no
        room; not in a rebuild, when the memory of the stages before may not be free yet.
        """
        is_start = not (is_rebuild or self.is_rebuild)
        # On CPUs each reports what it shares with the ranks of its node as free.
        on_cpu = self.stage.device == "cpu"
        part = 1 / len(infos) if on_cpu else min(1.0, self.gpus_per_rank or 1.0)
        if self.kv.gib is not None:
            rooms = [int(self.kv.gib * GIB)] * len(infos)
            beside = [max(0, info.room_bytes(part) - rooms[0]) for info in infos]
            num_requests = self._num_requests(beside, infos)
        else:
            if is_start and part < 1:
                self._check_part(part, infos)
            direct_bytes = int(self.kv.direct_gib * GIB)
            shares = [int(info.room_bytes(part) * self.kv.fraction) for info in infos]
            rooms = beside = [max(0, share - direct_bytes) for share in shares]
            num_requests = self._num_requests(beside, infos)
            pairs = zip(rooms, infos, strict=True)
            rooms = [room - num_requests * info.state_bytes for room, info in pairs]
        pairs = zip(rooms, infos, strict=True)
        counts = [room // info.kv_block_bytes for room, info in pairs if info.kv_block_bytes]
        # No more than all requests at full length can be used, also if fewer run for now.
        length = -(-self.scheduler.max_model_len // self.scheduler.block_size)
        num_blocks = max(2, min([*counts, num_requests * length + 1]))
        if is_start and num_requests < self.scheduler.most_requests:
            self._warn_of_states(num_requests, beside, infos)
        if self.kv.gib is not None and is_start:
            for info in infos:
                self._check_room(info.available_bytes, num_blocks * info.kv_block_bytes)
        block_bytes = infos[0].kv_block_bytes
        swap = int(self.kv.swap_gib * GIB) // block_bytes if block_bytes else 0
        return CacheSizes(num_blocks, swap, num_requests)

    def _num_requests(self, rooms: Sequence[int], infos: Sequence[StageInfo]) -> int:
        """Requests that may run, whose states, where layers keep them, take at most half of these
        rooms."""
        pairs = zip(rooms, infos, strict=True)
        fitting = [room // 2 // info.state_bytes for room, info in pairs if info.state_bytes]
        return max(1, min([self.scheduler.most_requests, *fitting]))

    def _warn_of_states(
        self, num_requests: int, rooms: Sequence[int], infos: Sequence[StageInfo]
    ) -> None:
        """Name the rank whose room is the smallest for its states, and what makes it larger."""
        pairs = [pair for pair in zip(rooms, infos, strict=True) if pair[1].state_bytes]
        room, info = min(pairs, key=lambda pair: pair[0] // pair[1].state_bytes)
        each, most = info.state_bytes / (1 << 20), self.scheduler.most_requests
        if self.kv.gib is None:
            where = f"kv.memory_fraction ({self.kv.fraction:g}) gives to states and KV cache"
            cure = "kv.memory_fraction raises that"
        else:
            where = f"kv.memory_gib ({self.kv.gib:g}) leaves free"
            cure = "a smaller kv.memory_gib raises that"
        logger.warning(
            "scheduling.max_requests: %d, not %d. Layers with a state, a draft model's too, keep "
            "%.1f MiB for each request, %.0f MiB for %d, and states may take half of the %.0f MiB "
            "that %s; %s, and max_requests: %d accepts it", num_requests, most, each, each * most,
            most, room / (1 << 20), where, cure, num_requests,
        )  # fmt: skip

    def _check_part(self, part: float, infos: Sequence[StageInfo]) -> None:
        """What is meant for Ray's count only would silently leave the smallest cache."""
        for info in infos:
            part_bytes = int(info.device_bytes * part)
            if info.device_bytes and part_bytes <= info.own_bytes:
                raise ValueError(
                    f"parallel.gpus_per_rank: a part of {part_bytes / GIB:.2f} GiB, but the "
                    f"weights and the largest step take {info.own_bytes / GIB:.2f} GiB "
                    "(kv.memory_gib sets a cache without regard to parts)"
                )

    def _check_room(self, free_bytes: int, cache_bytes: int) -> None:
        direct_bytes = int(self.kv.direct_gib * GIB)
        if cache_bytes + direct_bytes <= free_bytes:
            return
        beside = " beside `kv.direct_gib`" if direct_bytes else ""
        free_gib = max(0, free_bytes - direct_bytes) / GIB
        problem = f"kv.memory_gib: {self.kv.gib:g} GiB, but {free_gib:.2f} GiB are free{beside}"
        if self.stage.device != "cpu":
            raise ValueError(problem)
        # Files in use count as taken here, though the system can write them back.
        logger.warning("%s: the system may end the engine", problem)

    def max_model_len(self, info: StageInfo, num_blocks: int, *, in_fleet: bool = False) -> int:
        """The longest request, in tokens, which the KV cache must hold. Raises ValueError.

        in_fleet: other engines may hold more, to which fronts send what this one refuses. To
        clients they name what the engine with the most holds (`Fleet.longest`).
        """
        longest = min(self.scheduler.max_model_len, info.max_model_len)
        room = num_blocks * self.scheduler.block_size
        if room >= longest:
            return longest
        if self.whole_context:
            raise ValueError(
                f"model.max_model_len: the KV cache holds {room} tokens, not {longest} (see "
                "kv.memory_gib)"
            )
        if in_fleet:
            return longest
        logger.warning(
            "the KV cache holds %d tokens, so requests may have that many, not the model's %d (see "
            "kv.memory_gib)", room, longest,
        )  # fmt: skip
        return room
