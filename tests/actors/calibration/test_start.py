"""The cost model of a starting engine: measured once, then checked, and kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from actors.calibration.cache import CostModelFile
from actors.calibration.fit import predict
from actors.calibration.measure import reach_of
from actors.calibration.probe import ProbeFailed
from actors.calibration.start import calibrate_at_start, keep_learnt
from actors.engine.config import EngineConfig
from actors.scheduling.config import SchedulerConfig
from actors.scheduling.cost.model import CostModel
from actors.scheduling.cost.online import OnlineCostModel
from actors.scheduling.plan import StepPlan, StepResult, StepShape
from actors.stage.spec import StageInfo, StageSpec
from tests.actors.calibration.modeled_stages import LIMITS, TRUTH, Stages

INFO = StageInfo(64, 128, 4096, "bfloat16", "cpu", 4096, 1 << 30, (2,), 1000)
DECODES = StepShape(8, 8 * 900)
SLOWER = CostModel("slower", tokens_s=tuple((n, 3 * s) for n, s in TRUTH.tokens_s))


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    monkeypatch.setenv("LEGATO_CACHE", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text("{}")
    scheduler = SchedulerConfig(
        num_blocks=LIMITS.kv_tokens // 16,
        max_requests=LIMITS.max_requests,
        max_model_len=LIMITS.max_model_len,
        max_step_tokens=LIMITS.max_step_tokens,
    )
    return EngineConfig(StageSpec(str(tmp_path)), scheduler)


def kept(engine: EngineConfig) -> CostModel | None:
    return CostModelFile.of(engine.stage, INFO).load()


async def test_what_was_measured_once_is_checked_later(engine: EngineConfig) -> None:
    stages = Stages()
    found = await calibrate_at_start(engine, engine.scheduler, INFO, stages.execute)
    assert found is not None
    assert predict(found.model, DECODES) == pytest.approx(predict(TRUTH, DECODES), rel=0.05)
    assert kept(engine) == found.model
    assert (found.model.num_stages, found.model.max_model_len) == (1, LIMITS.max_model_len)
    later = Stages()
    checked = await calibrate_at_start(engine, engine.scheduler, INFO, later.execute)
    assert checked is not None
    assert checked.model == found.model
    assert 0 < later.num_steps < 20 < stages.num_steps


async def test_beyond_the_window_a_context_costs_no_more(engine: EngineConfig) -> None:
    """Also where no step was measured. A model kept before windows were known is not used."""
    truth, info = replace(TRUTH, attention_window=1024), replace(INFO, attention_window=1024)
    CostModelFile.of(engine.stage, INFO).save(TRUTH, reach_of(LIMITS))
    found = await calibrate_at_start(engine, engine.scheduler, info, Stages(truth).execute)
    assert found is not None
    for num_decodes, context in ((1, 500), (1, 4000), (16, 4000)):
        shape = StepShape(num_decodes, num_decodes * context)
        assert predict(found.model, shape) == pytest.approx(predict(truth, shape), rel=0.05)


async def test_the_room_of_states_is_told(engine: EngineConfig) -> None:
    """In whole tokens of KV. A model kept before this was told is not measured anew."""
    info = replace(INFO, state_bytes=10 * INFO.kv_block_bytes + 1)
    scheduler = replace(engine.scheduler, num_saved_states=0)
    found = await calibrate_at_start(engine, scheduler, info, Stages().execute)
    assert found is not None
    told, num_states = found.model, engine.scheduler.max_requests
    assert (told.state_tokens, told.num_states) == (161, num_states)
    assert told.kv_tokens == engine.scheduler.num_blocks * 16 + 161 * num_states
    file = CostModelFile.of(engine.stage, info)
    kv_tokens = engine.scheduler.num_blocks * 16
    before = replace(told, kv_tokens=kv_tokens, state_tokens=0, num_states=0)
    for old in (before, replace(told, num_states=0)):
        file.save(old, reach_of(LIMITS))
        stages = Stages()
        checked = await calibrate_at_start(engine, scheduler, info, stages.execute)
        assert checked is not None
        assert stages.num_steps < 20
        assert checked.model == told


async def test_a_model_of_another_memory_tells_of_that_of_this_engine(engine: EngineConfig) -> None:
    """The simulator runs as many requests as a cost model says there is room for."""
    first = await calibrate_at_start(engine, engine.scheduler, INFO, Stages().execute)
    fewer = replace(engine.scheduler, num_blocks=LIMITS.kv_tokens // 20, max_model_len=4000)
    stages = Stages()
    found = await calibrate_at_start(engine, fewer, INFO, stages.execute)
    assert first is not None
    assert found is not None
    assert stages.num_steps < 20
    memory = {"kv_tokens": fewer.num_blocks * 16, "max_model_len": 4000}
    assert found.model == replace(first.model, **memory)
    learnt = replace(found.model, learnt=((3, 0.5, 0.7),))
    CostModelFile.of(engine.stage, INFO).save_learnt(learnt)
    assert kept(engine) == learnt


async def test_a_model_of_shorter_contexts_is_measured_anew(engine: EngineConfig) -> None:
    """An engine with little KV cannot measure what long ones cost."""
    little = replace(engine.scheduler, num_blocks=256)
    first = await calibrate_at_start(engine, little, INFO, Stages().execute)
    stages = Stages()
    found = await calibrate_at_start(engine, engine.scheduler, INFO, stages.execute)
    assert first is not None
    assert found is not None
    assert stages.num_steps > 20
    again = Stages()
    assert await calibrate_at_start(engine, little, INFO, again.execute) is not None
    assert again.num_steps < 20


async def test_states_of_a_draft_model_alone_are_not_told(engine: EngineConfig) -> None:
    """A simulated request begins without them."""
    info = replace(INFO, state_bytes=10 * INFO.kv_block_bytes)
    found = await calibrate_at_start(engine, engine.scheduler, info, Stages().execute)
    assert found is not None
    assert (found.model.state_tokens, found.model.num_states) == (0, 0)


async def test_a_rebuild_keeps_no_stream_waiting_for_a_check(engine: EngineConfig) -> None:
    CostModelFile.of(engine.stage, INFO).save(TRUTH)
    stages, rebuilt = Stages(SLOWER), replace(engine, is_rebuild=True)
    found = await calibrate_at_start(rebuilt, engine.scheduler, INFO, stages.execute)
    assert found is not None
    assert stages.num_steps == 0
    assert predict(found.model, DECODES) == predict(TRUTH, DECODES)


async def test_a_model_that_does_not_fit_is_measured_anew(engine: EngineConfig) -> None:
    CostModelFile.of(engine.stage, INFO).save(TRUTH, reach_of(LIMITS))
    stages = Stages(SLOWER)

    async def execute(plan: StepPlan) -> StepResult:
        if plan.step_id == 0:  # of the check, and of what follows it
            stages.num_steps = 0
        return await stages.execute(plan)

    found = await calibrate_at_start(engine, engine.scheduler, INFO, execute)
    assert found is not None
    assert predict(found.model, DECODES) == pytest.approx(predict(SLOWER, DECODES), rel=0.05)
    assert kept(engine) == found.model


async def test_a_model_of_smaller_steps_is_measured_anew(engine: EngineConfig) -> None:
    """A GPU's steps of few tokens all take as long: beyond them nothing is foretold."""
    small = replace(engine.scheduler, max_step_tokens=64)
    first = await calibrate_at_start(engine, small, INFO, Stages().execute)
    stages = Stages()
    found = await calibrate_at_start(engine, engine.scheduler, INFO, stages.execute)
    assert first is not None
    assert found is not None
    assert first.model.tokens_s[-1][0] <= 64 < found.model.tokens_s[-1][0]
    again = Stages()
    checked = await calibrate_at_start(engine, small, INFO, again.execute)
    assert checked is not None
    assert checked.model == found.model
    assert again.num_steps < 20 < stages.num_steps


async def test_an_engine_too_small_to_measure_goes_without(engine: EngineConfig) -> None:
    small = replace(engine.scheduler, max_step_tokens=4, max_requests=2, max_model_len=64)
    stages = Stages()
    assert await calibrate_at_start(engine, small, INFO, stages.execute) is None
    assert kept(engine) is None
    assert not stages.known


async def test_stages_that_fail_are_not_taken_for_small_ones(engine: EngineConfig) -> None:
    async def execute(plan: StepPlan) -> StepResult:
        raise ProbeFailed("stage 0 rank 0 died")

    with pytest.raises(ProbeFailed, match="died"):
        await calibrate_at_start(engine, engine.scheduler, INFO, execute)
    assert kept(engine) is None


def test_what_was_learned_while_serving_is_kept(engine: EngineConfig) -> None:
    keep_learnt(engine, INFO, None)
    assert kept(engine) is None
    CostModelFile.of(engine.stage, INFO).save(TRUTH)
    cost = OnlineCostModel(TRUTH)
    profile_s = cost.step_s(DECODES)
    for _ in range(200):
        cost.observe(DECODES, 2 * profile_s)
    keep_learnt(engine, INFO, cost)
    found = kept(engine)
    assert found is not None
    assert OnlineCostModel(found).step_s(DECODES) == pytest.approx(2 * profile_s, rel=0.1)
