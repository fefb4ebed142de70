"""A replica's engine: streams that outlive their scheduler, and rebuilds that end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import ray

import app.engine_client.link as link
import app.engine_client.live as live
from actors.scheduling.admission.limits import QueueLimits
from actors.scheduling.cost.model import CostModel
from actors.scheduling.events import MayReturn
from actors.scheduling.request import FinishReason, Objective, SamplingParams
from app.engine_client.channel import SchedulerChannel
from app.engine_client.client import (
    EngineUnavailable,
    GenerationFailed,
    GenerationRequest,
    RequestRefused,
)
from app.engine_client.live import LiveEngine
from tests.actors.scheduling.fake_stages import expected_output
from tests.actors.scheduling.short_lives import request
from tests.app.engine_client.paper_scheduler import INFO, Cluster, in_place_of_ray, settings, until

PROMPT = (1, 2, 3)


def wanted(name: str = "r", output: int = 12, n: int = 1, **sampling: Any) -> GenerationRequest:
    return GenerationRequest(name, PROMPT, SamplingParams(output, **sampling), n)


def answer(output: int = 12, seed: int = 0) -> list[int]:
    """What the stages must give."""
    one = request(1, tokens=PROMPT, output=output, sampling={"seed": seed})
    return expected_output(one, INFO.max_model_len)[0]


class Reader:
    """Reads a request's stream as its client would."""

    def __init__(self, engine: LiveEngine, asked: GenerationRequest) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(asked.n)]
        self.reasons: list[FinishReason | None] = [None] * asked.n
        self.done = asyncio.create_task(self._read(engine, asked))

    async def _read(self, engine: LiveEngine, asked: GenerationRequest) -> None:
        async for chunk in engine.generate(asked):
            assert chunk.first == len(self.tokens[chunk.index]), "a token missing or sent twice"
            assert self.reasons[chunk.index] is None, "a chunk after the end"
            self.tokens[chunk.index] += chunk.tokens
            self.reasons[chunk.index] = chunk.finish_reason

    async def has(self, num_tokens: int) -> None:
        await until(lambda: len(self.tokens[0]) >= num_tokens)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return in_place_of_ray(monkeypatch)


@pytest.fixture
async def engine(cluster: Cluster) -> AsyncIterator[LiveEngine]:
    made = LiveEngine(settings(), "name", max_rebuilds=2)
    await made.start()
    yield made
    await made.close()


async def test_every_continuation_has_its_own_tokens(cluster: Cluster, engine: LiveEngine) -> None:
    reader = Reader(engine, wanted(n=3, seed=5))
    await reader.done
    assert reader.tokens == [answer(seed=seed) for seed in (5, 6, 7)]
    assert reader.reasons == [FinishReason.LENGTH] * 3
    assert engine.num_open == 0
    assert cluster.last.core.is_idle
    assert (engine.card.vocab_size, engine.num_blocks) == (INFO.vocab_size, 40)


@pytest.mark.parametrize("num_steps", [0, 1, 4])
async def test_streams_outlive_their_scheduler(
    cluster: Cluster, engine: LiveEngine, num_steps: int
) -> None:
    cluster.num_steps = num_steps
    reader, other = Reader(engine, wanted()), Reader(engine, wanted("s", n=2, seed=3))
    await until(lambda: cluster.last.stages.unanswered)
    await reader.has(min(num_steps, 1))
    cluster.num_steps = 1 << 30
    cluster.last.die()
    await asyncio.gather(reader.done, other.done)
    assert reader.tokens == [answer()]
    assert other.tokens == [answer(seed=3), answer(seed=4)]
    assert [one.config.is_rebuild for one in cluster.schedulers] == [False, True]
    assert engine.is_ready()
    assert cluster.last.core.is_idle


@pytest.mark.parametrize("limit", ["requests", "tokens", "per_tenant"])
@pytest.mark.parametrize("num_steps", [0, 8])
async def test_no_queue_limit_refuses_what_is_replayed(
    cluster: Cluster, engine: LiveEngine, limit: str, num_steps: int
) -> None:
    """Without a step, no request has a token that would tell it from a new one."""
    cluster.num_steps = num_steps
    readers = [Reader(engine, wanted(f"r{number}", seed=number)) for number in range(5)]
    for reader in readers:
        await reader.has(min(num_steps, 1))
    await until(lambda: len(cluster.last.core.requests.by_id) == len(readers))
    await engine.reconfigure({f"max_queued_{limit}": 1})
    cluster.num_steps = 1 << 30
    cluster.last.die()
    await asyncio.gather(*[reader.done for reader in readers])
    assert [reader.tokens for reader in readers] == [[answer(seed=n)] for n in range(5)]


async def test_a_step_gives_a_scheduler_all_its_rebuilds_again(
    cluster: Cluster, engine: LiveEngine
) -> None:
    told: list[int] = []
    engine.iterations.observers.append(lambda records, engine_id: told.append(len(records)))
    for number in range(1, 5):  # more often than rebuilds are allowed in a row
        await Reader(engine, wanted()).done
        await until(lambda: told)
        told.clear()
        cluster.last.die()
        await until(lambda n=number: len(cluster.schedulers) > n and engine.is_ready())
    assert engine.failure is None


async def test_rebuilds_that_do_not_help_end_every_stream(
    cluster: Cluster, engine: LiveEngine
) -> None:
    cluster.num_steps = 2
    reader = Reader(engine, wanted())
    await reader.has(1)
    cluster.start_errors = [OSError(28, "No space left on device")] * 2
    cluster.last.die()
    await until(lambda: not engine.is_ready())
    waits = Reader(engine, wanted("waits"))  # for a rebuilt engine
    for ended in (reader, waits):
        with pytest.raises(EngineUnavailable, match="could not be rebuilt"):
            await ended.done
    assert len(cluster.schedulers) == 3
    assert engine.failure == "the scheduler could not be rebuilt"
    assert not engine.is_ready()
    with pytest.raises(EngineUnavailable, match="could not be rebuilt"):
        await Reader(engine, wanted()).done


@pytest.mark.parametrize("broken", ["notify", "kill_stages"])
async def test_a_rebuild_that_raises_fails_the_engine_where_its_health_check_sees_it(
    cluster: Cluster, engine: LiveEngine, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def refuse(*arguments: object) -> None:
        raise RuntimeError("can't start new thread")

    cluster.num_steps = 2
    reader = Reader(engine, wanted())
    await reader.has(1)
    with monkeypatch.context() as shortage:
        shortage.setattr(link, broken, refuse)
        cluster.last.die()
        with pytest.raises(EngineUnavailable, match="could not be rebuilt"):
            await reader.done
    assert engine.failure == "the scheduler could not be rebuilt"
    with pytest.raises(EngineUnavailable, match="could not be rebuilt"):
        await Reader(engine, wanted()).done


async def test_the_late_end_of_a_failed_rebuild_does_not_begin_another(
    cluster: Cluster, engine: LiveEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [KeyError("tbt_s")]

    async def read_objective() -> None:
        if failures:
            raise failures.pop()

    monkeypatch.setattr(engine, "_read_objective", read_objective)
    monkeypatch.setattr(ray, "kill", lambda scheduler: None)  # it takes time
    cluster.last.die()
    await until(lambda: engine._rebuilding is not None and engine._rebuilding.done())
    cluster.schedulers[1].die()
    reader = Reader(engine, wanted())
    await reader.done
    assert reader.tokens == [answer()]
    assert len(cluster.schedulers) == 3


async def test_one_failed_rebuild_is_followed_by_another(
    cluster: Cluster, engine: LiveEngine
) -> None:
    cluster.num_steps = 2
    reader = Reader(engine, wanted())
    await reader.has(1)
    cluster.start_errors = [MemoryError()]
    cluster.num_steps = 1 << 30
    cluster.last.die()
    await reader.done
    assert reader.tokens == [answer()]
    assert engine.failure is None


async def test_a_request_that_kills_every_scheduler_ends_alone(cluster: Cluster) -> None:
    engine = LiveEngine(settings(), "name", max_rebuilds=5)
    await engine.start()
    others = [Reader(engine, wanted(f"r{n}", seed=n)) for n in range(2)]
    await others[1].has(1)
    cluster.killer = 3
    with pytest.raises(GenerationFailed, match="fails whenever"):
        await Reader(engine, wanted("killer")).done
    for number, other in enumerate(others):
        await other.done
        assert other.tokens == [answer(seed=number)]
    assert len(cluster.schedulers) == 4  # lost with the others, among suspects, alone
    await engine.close()


async def test_new_requests_wait_for_a_rebuild(
    cluster: Cluster, engine: LiveEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = cluster.last.stages
    stages.may_go_on.clear()
    stages.lose("a stage died")
    await until(lambda: not engine.is_ready())
    reader = Reader(engine, wanted())
    await asyncio.sleep(0)
    assert engine.num_open == 0
    monkeypatch.setattr(live, "_READY_WITHIN_S", 0.001)
    with pytest.raises(EngineUnavailable, match="being rebuilt") as caught:
        await Reader(engine, wanted("s")).done
    assert caught.value.retry_after_s == 5.0
    stages.may_go_on.set()
    await reader.done
    assert reader.tokens == [answer()]
    assert len(cluster.schedulers) == 1


async def test_a_stream_that_is_left_is_aborted(cluster: Cluster, engine: LiveEngine) -> None:
    cluster.num_steps = 3
    left = Reader(engine, wanted(output=40))
    await left.has(1)
    left.done.cancel()
    await until(lambda: engine.num_open == 0)
    cluster.let_go()
    await until(lambda: cluster.last.core.is_idle)
    assert cluster.last.core.num_steps < 10


async def test_a_stream_that_takes_too_long_is_aborted(cluster: Cluster) -> None:
    engine = LiveEngine(settings(request_deadline_s=0.02), "name")
    await engine.start()
    cluster.num_steps = 0
    with pytest.raises(EngineUnavailable, match=r"not done within 0.02 s"):
        await Reader(engine, wanted()).done
    assert engine.num_open == 0
    cluster.let_go()
    await until(lambda: cluster.last.core.is_idle)
    assert cluster.last.core.num_steps < 12  # it was not computed to its end
    await engine.close()


async def test_a_continuation_that_ends_early_leaves_the_others(
    cluster: Cluster, engine: LiveEngine
) -> None:
    cluster.num_steps = 3
    reader = Reader(engine, wanted(n=2, seed=8))
    await reader.has(1)
    engine.finish_early("r", 0)
    engine.finish_early("r", 0)  # its stop string may be found again in what is on its way
    engine.finish_early("unknown", 0)
    cluster.let_go()
    await reader.done
    assert reader.tokens[1] == answer(seed=9)
    assert reader.reasons == [None, FinishReason.LENGTH]
    await until(lambda: cluster.last.core.is_idle)


async def test_what_cannot_be_sent_is_refused_and_forgotten(
    cluster: Cluster, engine: LiveEngine
) -> None:
    with pytest.raises(RequestRefused, match="cannot be sent"):
        await Reader(engine, wanted(top_k=1 << 70)).done
    assert engine.num_open == 0
    with pytest.raises(RequestRefused, match="no room") as caught:  # by the core
        await Reader(engine, GenerationRequest("s", (1,) * 64, SamplingParams(1))).done
    assert caught.value.param == "prompt"
    assert engine.num_open == 0


async def test_changed_settings_outlive_the_scheduler(cluster: Cluster, engine: LiveEngine) -> None:
    await engine.reconfigure({"policy": "orca", "slo.tbt_ms": 50})
    assert engine.objective.tbt_s == 0.05
    with pytest.raises(RequestRefused):
        await engine.reconfigure({"policy": "magic"})
    cluster.last.die()
    await until(lambda: len(cluster.schedulers) == 2 and engine.is_ready())
    assert cluster.last.core.config.policy == "orca"
    await until(lambda: engine.objective.tbt_s == 0.05)


async def test_settings_that_are_changed_during_a_rebuild_reach_the_next_scheduler(
    cluster: Cluster, engine: LiveEngine
) -> None:
    cluster.last.die()
    await until(lambda: not engine.is_ready())
    await engine.reconfigure({"policy": "orca"})
    assert len(cluster.schedulers) == 2
    assert cluster.last.core.config.policy == "orca"


async def test_settings_that_only_fit_what_a_front_has_changed_are_accepted(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """Serve would kill a running replica that raises, with its streams."""
    model = CostModel("m", ((1, 0.01), (64, 0.02)), kv_tokens=640, max_model_len=64).to_dict()
    changes: dict[str, Any] = {"budget": "adaptive", "token_budget": None, "tbt_s": 0.1}
    scheduler = replace(settings().scheduler, cost_model=model, **changes)
    engine = LiveEngine(replace(settings(), scheduler=scheduler), "name")
    await engine.start()
    await engine._link.reconfigure({"budget": "fixed"})  # as a front does
    await engine.reconfigure({"token_budget": 32})
    assert cluster.last.core.config.token_budget == 32
    assert "token_budget: has no effect with the budget 'adaptive'" in caplog.text
    await engine.close()


async def test_settings_that_a_scheduler_took_before_it_died_are_accepted(
    cluster: Cluster, engine: LiveEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster.last.loop._questions, "status", cluster.last.die)
    await engine.reconfigure({"policy": "orca"})
    await until(lambda: len(cluster.schedulers) == 2 and engine.is_ready())
    assert cluster.last.core.config.policy == "orca"


def decodes_of(seconds: float) -> CostModel:
    return CostModel("m", ((1, seconds), (64, 2 * seconds)), kv_tokens=640, max_model_len=64)


async def is_rebuilt(cluster: Cluster, engine: LiveEngine, objective_s: float | None) -> None:
    """The scheduler dies, and the next follows this objective, of which the replica hears."""
    engine.objective = Objective()
    number = len(cluster.schedulers)
    cluster.last.die()
    await until(lambda: len(cluster.schedulers) > number and engine.is_ready())
    assert cluster.last.core.config.tbt_s == objective_s
    await until(lambda: engine.objective.tbt_s == objective_s)


async def test_an_objective_set_live_below_what_a_start_takes_outlives_the_scheduler(
    cluster: Cluster,
) -> None:
    cluster.measured = decodes_of(0.01)
    engine = LiveEngine(settings(), "name")
    await engine.start()
    await engine.reconfigure({"slo.tbt_ms": 12})
    assert engine.objective.tbt_s == 0.012
    await is_rebuilt(cluster, engine, 0.012)
    await engine.reconfigure({"policy": "orca"})
    await is_rebuilt(cluster, engine, 0.012)
    await engine.close()


async def test_the_objective_in_place_of_one_out_of_reach_outlives_the_scheduler(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.measured = decodes_of(0.01)
    scheduler = replace(settings().scheduler, tbt_s=0.012)
    engine = LiveEngine(replace(settings(), scheduler=scheduler), "name")
    await engine.start()
    assert engine.objective.tbt_s == pytest.approx(0.05)
    assert "a lone decode takes 10.0 ms, so 50.0 takes the place of 12.0" in caplog.text
    cluster.measured = decodes_of(0.1)  # by a machine that is busy
    await is_rebuilt(cluster, engine, engine.objective.tbt_s)
    await engine.close()


async def test_an_objective_by_rule_gives_way_to_one_set_live(cluster: Cluster) -> None:
    cluster.measured = decodes_of(0.01)
    scheduler = replace(settings().scheduler, tbt_rule="strict")
    engine = LiveEngine(replace(settings(), scheduler=scheduler), "name")
    await engine.start()
    await is_rebuilt(cluster, engine, engine.objective.tbt_s)
    await engine.reconfigure({"slo.tbt_ms": 90})
    await is_rebuilt(cluster, engine, 0.09)
    await engine.close()


async def test_a_scheduler_that_is_silent_is_killed_and_one_that_errs_is_not(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_HEARTBEAT_S", 0.0)
    engine = LiveEngine(settings(), "name")
    await engine.start()
    asked: list[None] = []

    def fail() -> None:
        asked.append(None)
        raise KeyError(7)

    monkeypatch.setattr(cluster.last.loop._questions, "stage_pids", fail)
    await until(lambda: len(asked) == 3)
    assert not cluster.last.is_dead
    with monkeypatch.context() as silence:
        silence.setattr(cluster.last.loop.peers, "send", lambda *answer: None)
        silence.setitem(SchedulerChannel.ask.__kwdefaults__, "within_s", 0.02)
        await until(lambda: cluster.schedulers[0].is_dead)
    await until(lambda: len(cluster.schedulers) == 2 and engine.is_ready())
    await Reader(engine, wanted()).done
    await engine.close()


async def test_leaving_waits_for_what_was_accepted(
    cluster: Cluster, engine: LiveEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "_LEAVING_PERIOD_S", 0.0)
    cluster.num_steps = 3
    reader = Reader(engine, wanted())
    await reader.has(1)
    leaving = asyncio.create_task(engine.leave())
    await asyncio.wait({leaving}, timeout=0.02)
    assert not leaving.done()
    cluster.let_go()
    await leaving
    await reader.done
    assert reader.tokens == [answer()]


async def test_what_a_refusal_implies_is_refused_here_and_told(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a flood of prompts, none of which is answered."""
    told: list[MayReturn] = []
    monkeypatch.setattr(QueueLimits, "turned_away", lambda _, refused, now_s: told.extend(refused))
    model = CostModel("m", ((1, 0.05), (64, 0.2)), kv_tokens=60_000, max_model_len=64)
    scheduler = replace(
        settings().scheduler,
        num_blocks=1000,
        admission="predictive",
        ttft_s=1.0,
        cost_model=model.to_dict(),
    )
    engine = LiveEngine(replace(settings(), scheduler=scheduler), "name")
    await engine.start()
    cluster.num_steps = 0
    readers: list[Reader] = []

    def foreseen(num_tokens: int, **others: Any) -> RequestRefused | None:
        sampling = SamplingParams(4)
        return engine.foreseen(GenerationRequest("r", (1,) * num_tokens, sampling, **others))

    try:
        while foreseen(30) is None:
            asked = GenerationRequest(f"r{len(readers)}", (1,) * 30, SamplingParams(4))
            readers.append(Reader(engine, asked))
            live = cluster.last.core.live_requests
            await until(lambda: readers[-1].done.done() or len(live) == len(readers))  # noqa: B023
        with pytest.raises(RequestRefused):
            await readers[-1].done
        assert foreseen(29) is None
        assert foreseen(30, objective=Objective(ttft_s=9.0)) is None
        assert not told
        readers.append(Reader(engine, GenerationRequest("last", (1,), SamplingParams(4))))
        await until(lambda: told)
        assert len(told) == 1
        assert told[0].work_s > 0.0
    finally:
        for reader in readers:
            reader.done.cancel()
        await asyncio.gather(*[reader.done for reader in readers], return_exceptions=True)
        await engine.close()


@pytest.mark.parametrize("num_turns", range(5))
async def test_a_client_that_leaves_as_the_engine_becomes_ready_is_not_served(
    num_turns: int,
) -> None:
    engine = LiveEngine(settings(), "tiny")
    reader = asyncio.ensure_future(anext(engine.generate(wanted())))
    await asyncio.sleep(0)
    engine._ready.set()
    for _ in range(num_turns):
        await asyncio.sleep(0)
    reader.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert reader.cancelled()
    assert engine.num_open == 0
