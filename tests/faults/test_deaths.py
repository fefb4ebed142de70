"""Processes of a server that serves are killed and stopped: its streams go on, token for token."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress

import httpx
import pytest

from tests.faults.streams import Streamed, stream_all
from tests.faults.surroundings import (
    MAX_TOKENS,
    Canary,
    pids_of,
    prepared,
    serving_stages,
    standby_stages,
    until,
)
from tests.faults.within import (
    KILLED_WHILE_LOADING_S,
    SCHEDULER_KILLED_S,
    STAGE_FROZEN_S,
    STAGE_KILLED_S,
    STEP_DEADLINE_S,
)
from tests.serve.server_process import Server
from tests.standstill import stand_still

pytestmark = [pytest.mark.serve, pytest.mark.timeout(240)]


def exact(streams: list[Streamed], canary: Canary, within_s: float) -> None:
    assert [s.text for s in streams] == canary.texts()
    assert all(s.ends[-1] == "data: [DONE]" for s in streams)
    assert max(s.longest_gap_s for s in streams) <= within_s


def told(server: Server, *patterns: str) -> None:
    """The terminal shows these lines, in this order, and nothing of Ray's about the deaths."""
    log = server.config.with_name("serve.log")
    wanted = "(?sm)" + ".*".join(rf"^[-\d]+ [:\d]+ {pattern}$" for pattern in patterns)
    until(lambda: re.search(wanted, log.read_text()), f"lines: {wanted}")
    assert "A worker died" not in log.read_text()


def test_row_1_a_stage_is_killed_in_the_middle_of_its_decodes(
    server: Server, canary: Canary
) -> None:
    """The standby takes the place of the lost stages, and is replaced."""
    before, standby = serving_stages(server), prepared(server)
    streams = stream_all(
        server, canary.prompts, MAX_TOKENS, lambda: os.kill(before[-1], signal.SIGKILL)
    )
    exact(streams, canary, STAGE_KILLED_S)
    status = httpx.get(f"{server.url}/console/status").json()
    assert status["recoveries"] >= 1
    assert sorted(serving_stages(server)) == sorted(standby)
    canary.check(server)
    told(
        server,
        r"stages lost \(.+\): rebuilding them, requests waiting: \d+ \(rebuild 1 of 3\)",
        r"stages rebuilt in \d+\.\d s, requests going on: \d+",
    )
    fresh = prepared(server)
    assert len(fresh) == 2
    assert not {*fresh} & {*before, *standby}


def test_a_standby_that_dies_disturbs_no_stream_and_is_replaced(
    server: Server, canary: Canary
) -> None:
    before, standby = serving_stages(server), prepared(server)
    streams = stream_all(
        server, canary.prompts, MAX_TOKENS, lambda: os.kill(standby[0], signal.SIGKILL)
    )
    exact(streams, canary, STAGE_KILLED_S)
    assert serving_stages(server) == before
    told(server, r"standby stages lost \([^)]{,120}\): replacing them, no request waits")
    until(lambda: not {*standby} & {*standby_stages(server)}, "its end")
    assert len(prepared(server)) == 2


def test_stages_are_lost_while_the_standby_is_stopped(server: Server, canary: Canary) -> None:
    """One that does not answer is not waited for."""
    os.kill(prepared(server)[0], signal.SIGSTOP)
    stages = serving_stages(server)
    streams = stream_all(
        server, canary.prompts, MAX_TOKENS, lambda: os.kill(stages[-1], signal.SIGKILL)
    )
    exact(streams, canary, STAGE_FROZEN_S)


def test_row_3_a_stage_stops(server: Server, canary: Canary) -> None:
    stages = serving_stages(server)
    prepared(server)
    streams = stream_all(
        server, canary.prompts, MAX_TOKENS, lambda: os.kill(stages[0], signal.SIGSTOP)
    )
    exact(streams, canary, STAGE_FROZEN_S)


def test_a_machine_that_stands_still_takes_no_part_of_the_engine_for_dead(
    server: Server, canary: Canary
) -> None:
    """All of it stops for three times the deadline of a step; the stages are the last to go on."""
    stages = serving_stages(server)
    judges = [*pids_of(server, "ray::ServeReplica"), *pids_of(server, "ray::SchedulerActor")]
    assert len(judges) == 2
    status = f"{server.url}/console/status"
    before = httpx.get(status).json()
    still_s = 3 * STEP_DEADLINE_S
    streams = stream_all(
        server, canary.prompts, MAX_TOKENS, lambda: stand_still(judges, stages, still_s)
    )
    exact(streams, canary, still_s + STAGE_KILLED_S)
    assert min(s.longest_gap_s for s in streams) >= still_s
    after = httpx.get(status).json()
    assert [after[key] for key in ("pid", "stage_pids", "recoveries")] == [
        before[key] for key in ("pid", "stage_pids", "recoveries")
    ]


def test_row_4_the_scheduler_is_killed_and_what_was_set_stays(
    server: Server, canary: Canary
) -> None:
    (scheduler,) = pids_of(server, "ray::SchedulerActor")
    prepared(server)
    settings = f"{server.url}/console/settings"
    assert httpx.post(settings, json={"slo.tbt_ms": 250}).status_code == 200
    try:
        streams = stream_all(
            server, canary.prompts, MAX_TOKENS, lambda: os.kill(scheduler, signal.SIGKILL)
        )
        exact(streams, canary, SCHEDULER_KILLED_S)
        told(
            server,
            r"scheduler lost: rebuilding it, requests waiting: \d+",
            r"scheduler rebuilt in \d+\.\d s, requests going on: \d+",
        )
        status = httpx.get(f"{server.url}/console/status").json()
        assert (status["tbt_s"], status["pid"] != scheduler) == (0.25, True)
    finally:
        assert httpx.post(settings, json={"slo.tbt_ms": None}).status_code == 200


def test_row_9_a_stage_is_killed_while_it_loads(server: Server) -> None:
    """Of the set that takes the place of a lost one: that is built again, and the engine is not
    reported as ready before it is."""
    prepared(server)  # so that none begins to load before these are killed
    killed = pids_of(server, "ray::StageActor")  # the standby too: nothing is prepared
    for pid in killed:
        with suppress(ProcessLookupError):  # one of a scheduler that was killed before
            os.kill(pid, signal.SIGKILL)
    begin_s = time.monotonic()

    def is_ready() -> bool:
        return httpx.get(f"{server.url}/health").status_code == 200

    def fresh() -> list[int]:
        return [pid for pid in pids_of(server, "ray::StageActor") if pid not in killed]

    until(fresh, "a new stage begins to load", KILLED_WHILE_LOADING_S)
    assert not is_ready()
    killed.append(fresh()[0])
    os.kill(killed[-1], signal.SIGKILL)
    until(is_ready, "the set is built once more", KILLED_WHILE_LOADING_S)
    assert len(serving_stages(server)) == 2
    assert time.monotonic() - begin_s <= KILLED_WHILE_LOADING_S


def test_readiness_says_that_the_engine_is_being_rebuilt(server: Server) -> None:
    """Gap 5: green again only once requests are taken."""
    (scheduler,) = pids_of(server, "ray::SchedulerActor")
    os.kill(scheduler, signal.SIGKILL)
    begin_s = time.monotonic()
    health = f"{server.url}/health"
    refused = until(lambda: httpx.get(health).status_code == 503, "not ready")
    until(lambda: httpx.get(health).status_code == 200, "ready", 2 * SCHEDULER_KILLED_S)
    assert refused
    assert time.monotonic() - begin_s <= 2 * SCHEDULER_KILLED_S
