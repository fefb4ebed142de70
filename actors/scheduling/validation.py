"""The invariants between two events; tests check them after each event."""

from __future__ import annotations

from collections import Counter

from actors.scheduling.core import Core
from actors.scheduling.state import RequestState, RequestStatus


def validate(core: Core) -> None:
    """Raise AssertionError naming the first broken invariant."""
    requests = core.requests
    running = [*requests.decoding, *requests.prefilling]
    assert len(set(map(id, running))) == len(running), "a request runs twice"
    by_status: dict[RequestStatus, list[RequestState]] = {status: [] for status in RequestStatus}
    for state in requests.by_id.values():
        by_status[state.status].append(state)
    assert not by_status[RequestStatus.ENDED], "an ended request is still listed"
    assert set(map(id, by_status[RequestStatus.RUNNING])) == set(map(id, running))
    assert len(running) == requests.running.num_requests
    assert requests.running.num_slots_taken <= core.config.most_requests
    for listed in (requests.decoding, requests.prefilling):
        assert listed == sorted(listed, key=lambda s: s.order_key), "not in order"
    _validate_counts(core, by_status)
    _validate_progress(core, by_status)
    _validate_memory(core)


def _validate_counts(core: Core, by_status: dict[RequestStatus, list[RequestState]]) -> None:
    requests, queue = core.requests, core.requests.waiting
    waiting, finishing = by_status[RequestStatus.WAITING], by_status[RequestStatus.FINISHING]
    assert queue.num_requests == len(waiting)
    assert queue.num_tokens == sum(s.num_tokens for s in waiting)
    assert queue.num_shared_tokens == sum(queue.shared_tokens_of(s) for s in waiting)
    assert len(requests.running.finishing) == len(finishing)
    assert requests.running.num_finishing_blocks == sum(len(s.block_table) for s in finishing)
    assert requests.num_in_flight <= core.config.depth
    assert queue.waiting_of == Counter(s.request.tenant for s in waiting)
    background = [s for s in waiting if s.is_background]
    assert requests.num_background == sum(s.is_background for s in requests.by_id.values())
    assert queue.num_background == len(background)
    assert queue.num_background_tokens == sum(s.num_tokens for s in background)
    assert queue.num_background_shared == sum(queue.shared_tokens_of(s) for s in background)
    by_class: dict[tuple[bool, str], tuple[int, int]] = {}
    for state in waiting:
        key = state.is_background, state.request.tenant
        number, num_tokens = by_class.get(key, (0, 0))
        num_new = state.num_tokens - queue.shared_tokens_of(state)
        by_class[key] = number + 1, num_tokens + num_new
    assert queue.waiting_by_class == by_class
    running = by_status[RequestStatus.RUNNING]
    assert queue.running_of == Counter(s.request.tenant for s in running)


def _validate_progress(core: Core, by_status: dict[RequestStatus, list[RequestState]]) -> None:
    requests, size = core.requests, core.config.block_size
    in_flight = Counter(id(s) for step in core.in_flight for s in step.members())
    drafted = {id(p.state): p.num_drafts for step in core.in_flight for p in step.drafted}
    for state in requests.by_id.values():
        assert state.num_drafts == drafted.get(id(state), 0), state
        assert not state.num_drafts or state.in_flight == 1, state
        assert state.in_flight == in_flight[id(state)] <= core.config.chunks_per_request, state
        assert state.num_tokens == state.num_prompt_tokens + len(state.output_token_ids), state
        assert state.num_tokens < max(state.max_length, state.num_prompt_tokens + 1), state
        assert state.capacity == len(state.block_table) * size
    for state in by_status[RequestStatus.WAITING]:
        assert not state.block_table, state
        assert state.in_flight == 0, state
        assert not state.on_stages, state
        assert state.num_computed_tokens <= len(state.host_blocks) * size, state
    for state in by_status[RequestStatus.FINISHING]:
        assert state.in_flight > 0, state
    for state in requests.prefilling:
        assert state.num_computed_tokens < state.num_tokens, state
        assert state.num_computed_tokens <= state.capacity, state
    for state in requests.decoding:
        assert state.num_computed_tokens <= state.capacity, state
        if state.num_computed_tokens < state.num_tokens - 1:  # it has gone back
            assert core.config.num_saved_states is not None, state
            assert state.in_flight == state.decode_limit == 0, state
        ahead = state.num_drafts or core.config.steps_per_request - 1
        assert state.num_computed_tokens <= state.num_tokens + ahead, state
        assert state.num_computed_tokens <= max(state.end, state.num_tokens), state


def _validate_memory(core: Core) -> None:
    running = core.requests.running
    references: Counter[int] = Counter()
    held_on_host: list[int] = list(running.swap.returned)
    for state in core.requests.by_id.values():
        assert len(set(state.block_table)) == len(state.block_table), "a block twice in one table"
        references.update(state.block_table)
        held_on_host += state.host_blocks
    for step in core.in_flight:
        references.update(step.pinned)
        held_on_host += step.host_blocks
    references.update(source for source, _ in running.copies)
    if core.tier is not None:
        references.update(core.tier.pinned())
    running.block_manager.validate(references)
    running.swap.host.validate(held_on_host)
