"""Cost models kept between starts: found again by what they belong to, never trusted blindly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from actors.calibration.cache import CostModelFile, Reach, cache_folder
from actors.scheduling.cost.model import CostModel
from actors.stage.spec import StageInfo, StageSpec

MODEL = CostModel("measured", tokens_s=((1, 0.001), (64, 0.01)), decode_kv_s=1e-8)
INFO = StageInfo(64, 128, 256, "bfloat16", "cpu", 4096, 1 << 30, (2,), 1000)


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StageSpec:
    monkeypatch.setenv("LEGATO_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"hidden_size": 64}')
    return StageSpec(str(tmp_path / "model"))


def test_what_was_saved_is_found_again(spec: StageSpec) -> None:
    file = CostModelFile.of(spec, INFO)
    assert file.load() is None
    file.save(MODEL)
    assert CostModelFile.of(spec, INFO).load() == MODEL
    assert [path.suffix for path in file.path.parent.iterdir()] == [".json"]


def test_what_was_measured_up_to_fewer_tokens_is_not_used_beyond(spec: StageSpec) -> None:
    file = CostModelFile.of(spec, INFO)
    file.save(MODEL, Reach(256, 8))
    assert (file.load(Reach(256, 8)), file.load(Reach(512)), file.load(Reach(256, 9))) == (
        MODEL,
        None,
        None,
    )
    learnt = replace(MODEL, learnt=((3, 0.5, 0.7),))
    file.save_learnt(learnt)
    assert (file.load(Reach(256, 8)), file.load(Reach(512)), file.load(Reach(256, 9))) == (
        learnt,
        None,
        None,
    )


def test_what_was_learnt_does_not_replace_what_another_engine_measured(spec: StageSpec) -> None:
    file = CostModelFile.of(spec, INFO)
    file.save(MODEL, Reach(256, 8))
    far = replace(MODEL, tokens_s=((1, 0.001), (4096, 0.4)))
    file.save(far, Reach(4096))
    file.save_learnt(replace(MODEL, learnt=((3, 0.5, 0.7),)))
    assert file.load(Reach(4096)) == far


def test_another_engine_does_not_find_it(spec: StageSpec) -> None:
    CostModelFile.of(spec, INFO).save(MODEL)
    for other in (
        replace(spec, quantization="int8"),
        replace(spec, num_stages=2),
        replace(spec, num_threads=1),
        replace(spec, kv_dtype="int8"),
    ):
        assert CostModelFile.of(other, INFO).load() is None
    assert CostModelFile.of(spec, replace(INFO, backend="torch")).load() is None
    (Path(spec.model_path) / "config.json").write_text('{"hidden_size": 65}')
    assert CostModelFile.of(spec, INFO).load() is None


def test_a_broken_file_is_not_used_and_is_replaced(spec: StageSpec) -> None:
    file = CostModelFile.of(spec, INFO)
    file.save(MODEL)
    for broken in ("{", "[]", '{"key": 1}', '{"key": null, "cost_model": {"name": 3}}'):
        file.path.write_text(broken)
        assert file.load() is None
    file.save(MODEL)
    assert file.load() == MODEL


def test_a_folder_that_cannot_be_written_costs_no_start(
    spec: StageSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").write_text("a file where the folder should be")
    monkeypatch.setenv("LEGATO_CACHE", str(tmp_path / "taken"))
    CostModelFile.of(spec, INFO).save(MODEL)


def test_the_folder_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LEGATO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/legato")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "legato"
