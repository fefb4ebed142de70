"""The engine without its background requests, and with these alone."""

from __future__ import annotations

from dataclasses import replace

from actors.scheduling.class_view import ClassView
from actors.scheduling.interfaces import EngineView
from tests.actors.scheduling.driver import Driver
from tests.actors.scheduling.short_lives import config, request


def engine() -> Driver:
    """Of each class: a decode, a prompt that has begun, and one or two that wait."""
    driver = Driver(config(token_budget=8, max_requests=4, max_chunk=2))
    for number, (prompt, priority) in enumerate(((1, 0), (1, -5), (30, -5), (30, 0))):
        driver.submit(replace(request(number, prompt=prompt, output=20), priority=priority))
        driver.answer()
    for number, (prompt, priority) in enumerate(((7, 0), (5, -5), (6, -5)), 4):
        driver.submit(replace(request(number, prompt=prompt, output=2), priority=priority))
    return driver


def names(view: EngineView) -> tuple[list[int], list[int]]:
    return [v.request_id for v in view.decoding], [v.request_id for v in view.prefilling]


def test_each_class_has_its_requests_and_both_have_the_memory() -> None:
    driver = engine()
    requests = driver.core.requests
    assert requests.are_mixed
    assert not requests.is_background
    live, background = ClassView(requests, False), ClassView(requests, True)
    assert names(live) == ([0], [3])
    assert names(background) == ([1], [2])
    assert (live.num_waiting, live.num_waiting_tokens) == (1, 7)
    assert (background.num_waiting, background.num_waiting_tokens) == (2, 11)
    assert (live.is_background, background.is_background) == (False, True)
    head = live.head()
    assert head is not None
    assert head.request_id == 4
    assert background.head() is None  # not before the live one
    for view in (live, background):
        assert view.num_free_blocks == requests.num_free_blocks < view.num_blocks
        assert view.num_in_flight == requests.num_in_flight
        assert view.knows(0)
        assert view.knows(1)
        assert not view.knows(99)
    driver.drain()


def test_classes_are_counted_from_queue_to_end() -> None:
    driver = engine()
    requests = driver.core.requests
    driver.abort(1)
    driver.abort(5)
    for number in (0, 3, 4):
        driver.abort(number)
    while any(number in requests.by_id for number in (0, 1, 3, 4, 5)):
        driver.answer()
    assert requests.is_background
    assert not requests.are_mixed
    driver.drain()
    assert requests.num_background == requests.waiting.num_background == 0
    assert requests.waiting.num_background_tokens == 0
    assert not requests.is_background
