"""What must hold between any two events; tests ask after every one of them."""

from __future__ import annotations

from collections import Counter

from actors.scheduling.core import Core
from actors.scheduling.state import RequestState, Status


def validate(core: Core) -> None:
    """Raise AssertionError naming the first broken invariant."""
    residents = core.residents
    running = [*residents.decoding, *residents.prefilling]
    assert len(set(map(id, running))) == len(running), "a request runs twice"
    by_status: dict[Status, list[RequestState]] = {status: [] for status in Status}
    for state in residents.states.values():
        by_status[state.status].append(state)
    assert not by_status[Status.ENDED], "an ended request is still known"
    assert set(map(id, by_status[Status.RUNNING])) == set(map(id, running))
    assert len(running) + residents.num_leaving <= core.config.most_requests
    for residing in (residents.decoding, residents.prefilling):
        assert residing == sorted(residing, key=lambda s: s.rank), "not in order of rank"
    _validate_counts(core, by_status)
    _validate_progress(core, by_status)
    _validate_memory(core)


def _validate_counts(core: Core, by_status: dict[Status, list[RequestState]]) -> None:
    residents = core.residents
    waiting, leaving = by_status[Status.WAITING], by_status[Status.LEAVING]
    assert residents.num_waiting == len(waiting)
    assert residents.num_waiting_tokens == sum(s.length for s in waiting)
    assert residents.num_leaving == len(leaving)
    assert residents.leaving_blocks == sum(len(s.blocks) for s in leaving)
    assert residents.num_in_flight == len(core.in_flight) <= core.config.depth
    assert residents.waiting_of == Counter(s.request.tenant for s in waiting)
    running = by_status[Status.RUNNING]
    assert residents.running_of == Counter(s.request.tenant for s in running)


def _validate_progress(core: Core, by_status: dict[Status, list[RequestState]]) -> None:
    residents, size = core.residents, core.config.block_size
    in_flight = Counter(id(s) for step in core.in_flight for s in step.members())
    for state in residents.states.values():
        assert state.in_flight == in_flight[id(state)] <= core.config.chunks_per_request, state
        assert state.length == state.num_prompt_tokens + len(state.outputs), state
        assert state.length < max(state.max_length, state.num_prompt_tokens + 1), state
        assert state.capacity == len(state.blocks) * size
    for state in by_status[Status.WAITING]:
        assert not state.blocks, state
        assert state.in_flight == 0, state
        assert not state.mirrored, state
        assert state.planned <= len(state.host_blocks) * size, state
    for state in by_status[Status.LEAVING]:
        assert state.in_flight > 0, state
    for state in residents.prefilling:
        assert state.planned < state.length, state
        assert state.planned <= state.capacity, state
    for state in residents.decoding:
        assert state.length - 1 <= state.planned <= state.capacity, state
        assert state.planned <= state.length - 1 + core.config.steps_per_request, state
        assert state.planned <= max(state.end, state.length), state


def _validate_memory(core: Core) -> None:
    residents = core.residents
    references: Counter[int] = Counter()
    held_on_host: list[int] = list(residents.swap.returned)
    for state in residents.states.values():
        assert len(set(state.blocks)) == len(state.blocks), "a block twice in one table"
        references.update(state.blocks)
        held_on_host += state.host_blocks
    for step in core.in_flight:
        references.update(step.pinned)
        held_on_host += step.host_blocks
    references.update(source for source, _ in residents.copies)
    residents.blocks.validate(references)
    residents.swap.host.validate(held_on_host)
