"""What a checkpoint of a mixture holds beside its experts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.stage.models.config import ModelError
from actors.stage.runner import StageRunner
from actors.stage.spec import StageSpec
from kernels.layer_weights import Experts
from kernels.torch.linear import TorchLinear
from tests.actors.stage.greedy_reference import GREEDY, expected, make_prompts
from tests.actors.stage.mini_planner import MiniPlanner, make_chain

WEIGHTS = "model.safetensors"
GATE = "model.layers.1.mlp.gate.weight"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def loaded(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[Experts]:
    found: list[Experts] = []

    def noted(*arguments: object) -> Experts:
        found.append(Experts(*arguments))  # type: ignore[arg-type]
        return found[-1]

    monkeypatch.setattr("actors.stage.weights.experts.Experts", noted)
    StageRunner(StageSpec(str(folder), backend="torch"))
    return found


def test_a_correction_bias_is_not_rounded_to_half_precision(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(tiny_model("glm4-moe", dtype=torch.bfloat16), tmp_path / "model")
    tensors = load_file(folder / WEIGHTS)
    tensors[BIAS] = torch.linspace(4.0, 4.01, 8)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    first, _ = loaded(monkeypatch, folder)
    assert first.correction_bias_E is not None
    assert torch.equal(first.correction_bias_E, tensors[BIAS])


@pytest.mark.parametrize(("variant", "wide"), [("ernie4-5-moe", True), ("qwen2-moe", False)])
def test_a_wide_router_is_not_rounded_to_half_precision(
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variant: str,
    wide: bool,
) -> None:
    folder = shutil.copytree(tiny_model(variant, dtype=torch.bfloat16), tmp_path / "model")
    tensors = load_file(folder / WEIGHTS)
    tensors[GATE] = torch.linspace(1.0, 1.01, tensors[GATE].numel()).view_as(tensors[GATE])
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    router = loaded(monkeypatch, folder)[0].router
    assert isinstance(router, TorchLinear)
    assert torch.equal(router.weight_OK.float(), tensors[GATE]) == wide


def test_layers_that_predict_further_tokens_are_not_read(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Unless config.json says nothing of them."""
    folder = shutil.copytree(tiny_model("glm4-moe"), tmp_path / "model")
    tensors = load_file(folder / WEIGHTS)
    tensors["model.layers.3.eh_proj.weight"] = torch.zeros(64, 128)
    tensors["model.layers.3.input_layernorm.weight"] = torch.zeros(64)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    answers = MiniPlanner(make_chain(folder)).run(make_prompts(), GREEDY)
    assert answers == expected("glm4-moe")
    config = {key: v for key, v in config.items() if key not in ("num_mtp_layers",)}
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ModelError, match=r"unexpected tensor model\.layers\.3"):
        make_chain(folder)
