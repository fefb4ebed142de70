"""Texts that were served: the newest are known, within a tenant, in bounded memory."""

from __future__ import annotations

from dataclasses import replace

from actors.scheduling.event_log import check_replay, config_row, to_row
from actors.scheduling.request import Request, SamplingParams
from actors.scheduling.speculation import history as module
from actors.scheduling.speculation.history import AT_ONCE, Histories, History, Reading
from tests.actors.scheduling.driver import Driver
from tests.actors.scheduling.speculation.test_speculation import config


def request(tenant: str = "", salt: str = "") -> Request:
    return Request(1, (1,), SamplingParams(1), 0.0, tenant=tenant, cache_salt=salt)


def test_what_is_read_is_found_and_the_oldest_is_forgotten() -> None:
    history = History()
    part = module._PART
    for first in range(0, 4 * part, 1000):
        history.add(range(first, first + 1000))
        history.read(Reading(1000))
    newest = 4 * part - 500
    assert history.find([newest - 3, newest - 2, newest - 1])[2] == 3
    assert history.find([5, 6, 7])[2] == 0
    assert len(history._newer.tokens) + len(history._older.tokens) <= 2 * (part + 1000)


def test_reading_keeps_to_its_allowance() -> None:
    history, reading = History(), Reading()
    history.add(range(3000), range(5000, 5010))
    history.read(reading)
    assert reading.left == 0
    assert history.find([AT_ONCE - 4, AT_ONCE - 3, AT_ONCE - 2])[2] == 3
    assert history.find([2500, 2501, 2502])[2] == 0
    reading.left = AT_ONCE
    history.read(reading)
    assert history.find([2500, 2501, 2502])[2] == 3
    assert history.find([5000, 5001, 5002])[2] == 3


def test_more_than_can_be_kept_is_not_read() -> None:
    history = History()
    for _ in range(100):
        history.add(range(10_000))
    assert sum(len(text) for text in history._pending) <= module._MOST_PENDING


def test_tenants_and_salts_share_nothing() -> None:
    histories = Histories()
    histories.of(request("a", "s")).add((1, 2, 3, 4))
    histories.read(Reading())
    for other in (request("b", "s"), request("a", "t"), request()):
        assert histories.of(other).find([1, 2, 3])[2] == 0
    assert histories.of(request("a", "s")).find([1, 2, 3])[2] == 3


def test_the_least_recently_used_is_forgotten() -> None:
    histories = Histories()
    first = histories.of(request("first"))
    for number in range(module._MOST - 1):
        histories.of(request(str(number)))
    assert histories.of(request("first")) is first
    histories.of(request("one more"))
    assert histories.of(request("first")) is first
    assert len(histories._histories) == module._MOST


def served(tenants: tuple[str, str]) -> tuple[int, Driver]:
    """Accepted drafts of a request, after another with the same answer has been served."""
    driver = Driver(config(lookahead=False, max_model_len=200, num_blocks=100))
    for number, tenant in enumerate(tenants):
        before = driver.core.outcomes.num_accepted_drafts
        params = SamplingParams(60, seed=3)
        driver.submit(replace(Request(number, (1, 2, 3), params, 0.0), tenant=tenant))
        driver.drain()
    driver.check_everyone_finished()
    return driver.core.outcomes.num_accepted_drafts - before, driver


def test_an_answer_served_before_is_drafted() -> None:
    again, driver = served(("a", "a"))
    apart, _ = served(("a", "b"))
    assert again > 40 > apart
    rows = [config_row(driver.config), *(to_row(*entry) for entry in driver.log)]
    assert check_replay(rows) == len(rows)
