"""An engine measures itself at start, keeps what it found, and answers with the same tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.calibration.cache import cache_folder
from actors.scheduling.request import Objective, SamplingParams
from app.engine_client.client import GenerationRequest, RequestRefused
from app.engine_client.live import LiveEngine
from tests.live.reference import ask, ask_all, expected, make_prompts, settled

pytestmark = pytest.mark.ray


@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.long), 2])
async def test_the_first_start_measures_and_the_next_one_reads(
    make_engine: Callable[..., LiveEngine],
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    stages: int,
) -> None:
    # A name of its own: all tests share one cache, and the file is called after the folder.
    model = shutil.copytree(tiny_model("llama"), tmp_path / f"measured-{stages}")

    def files() -> set[Path]:
        return set((cache_folder() / "cost_models").glob(f"{model.name}-*.json"))

    assert not files()
    saved: set[Path] = set()
    for _ in range(2):
        engine = make_engine(
            model,
            parallel={"pipeline_stages": stages},
            scheduling={"budget": "auto", "max_requests": 32},
            slo={"tbt_ms": 50},
        )
        await engine.start()
        try:
            assert await ask_all(engine, make_prompts()) == expected("llama")
            await ask(engine, (1, 2, 3), 40)  # alone: so many steps of one kind
            status = await settled(engine)
            assert status["outlook"]["num_tokens"] > 16
            assert status["num_free_blocks"] == status["num_blocks"], "KV blocks leaked"
        finally:
            await engine.close()
        saved = saved or files()
        assert files() == saved
    (file,) = saved
    content = json.loads(file.read_text())
    assert content["key"]["num_stages"] == stages
    assert content["cost_model"]["source"] == "measured at start"
    assert content["cost_model"]["learnt"], "what an engine learns is kept as it ends"


async def test_an_objective_that_cannot_be_had_is_refused(
    make_engine: Callable[..., LiveEngine], tiny_model: Callable[..., Path]
) -> None:
    engine = make_engine(tiny_model("llama"), scheduling={"budget": "auto"})
    await engine.start()
    try:
        request = GenerationRequest(
            "hasty", (1, 2, 3), SamplingParams(4), objective=Objective(tbt_s=1e-6)
        )
        with pytest.raises(RequestRefused, match="is not achievable") as caught:
            async for _ in engine.generate(request):
                pass
        assert caught.value.param == "slo.tbt_ms"
        assert caught.value.retry_after_s is None
        assert len(await ask(engine, (1, 2, 3))) == 16
    finally:
        await engine.close()
