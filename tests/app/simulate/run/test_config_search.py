"""What a search is of: a model on a device, a model's folder, or a cost model."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.simulate.hardware.interconnect import SHAPES
from app.simulate.hardware.operators import CONFIGS
from app.simulate.run.config_search import candidates, is_cost_model, judge
from app.simulate.workload.specs import TrafficSpec

FOLDER = str(SHAPES / "llama3-1b")


@pytest.mark.parametrize(
    ("target", "device"),
    [(FOLDER, "a100"), (f"{FOLDER}/config.json", "a100"), (f"{FOLDER}/a40", "a40")],
)
def test_a_folder_is_searched_like_a_model_on_a_device(target: str, device: str) -> None:
    found = candidates(target)
    assert not is_cost_model(target)
    assert [(c.tensor_ranks, c.num_stages, c.budget, c.device) for c in found] == [
        (c.tensor_ranks, c.num_stages, c.budget, device) for c in candidates("mistral-7b")
    ]
    if device == "a100":
        assert found[0].cost_model().name == "llama3-1b-a100-tp1-pp1"
    else:  # which were published of one model only
        with pytest.raises(ValueError, match=r"no published timings of layers of .* on a40"):
            found[0].cost_model()


def test_a_kind_of_engine_for_a_folder_is_judged() -> None:
    first = candidates(FOLDER)[0]
    verdict = judge(first, TrafficSpec("fixed:100,4", "poisson", 64, 0), 0.1, 1.0)
    assert not verdict.impossible
    assert verdict.capacity_qps > 1.0


def test_targets_that_are_none_are_named(tmp_path: Path) -> None:
    assert is_cost_model("yi-34b-a100-tp2")
    assert is_cost_model(str(CONFIGS / "yi-34b-a100-tp2.json"))
    assert not is_cost_model("yi-34b")
    with pytest.raises(OSError, match=r"config\.json"):
        candidates(str(tmp_path))
    with pytest.raises(ValueError, match="unknown device 'abacus'"):
        candidates(f"{FOLDER}/abacus")[0].cost_model()
