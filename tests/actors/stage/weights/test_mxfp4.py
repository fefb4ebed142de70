"""gpt-oss as it is published: with experts in mxfp4, the tokens of the model they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.stage.folder_check import check_folder
from actors.stage.models.config import ModelError
from kernels.mxfp4 import unpack_mxfp4
from tests import tiny_models
from tests.actors.stage.greedy_reference import make_prompts, skip_unless_available
from tests.actors.stage.mini_planner import MiniPlanner, make_chain
from tests.actors.stage.weights import mxfp4_folders
from tests.actors.stage.weights.test_packed import GREEDY, LENGTHS, answers

DOWN = "model.layers.1.mlp.experts.down_proj"


def test_numbers_are_those_that_transformers_reads() -> None:
    blocks = torch.randint(0, 256, (3, 5, 4, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 5, 4), dtype=torch.uint8)
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    for expert in range(3):
        assert torch.equal(unpack_mxfp4(blocks[expert], scales[expert]).T, theirs[expert])


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_greedy(tmp_path: Path, backend: str) -> None:
    skip_unless_available(backend)
    model = mxfp4_folders.write(tmp_path)
    planner = MiniPlanner(make_chain(tmp_path, 2, backend=backend), feeds=True)
    assert planner.run(make_prompts(LENGTHS), GREEDY) == answers(model)
    assert check_folder(tmp_path).startswith("GptOssForCausalLM, 3 layers, 0.3 M parameters, mxfp4")


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    mxfp4_folders.write(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for change, message in (
        ({f"{DOWN}_scales": tensors[f"{DOWN}_scales"][:, :, :1]}, "has shape"),
        ({f"{DOWN}_bias": tensors[f"{DOWN}_bias"][:1]}, "has shape"),
    ):
        save_file({**tensors, **{k: v.contiguous() for k, v in change.items()}}, path)
        with pytest.raises(ModelError, match=rf"model\.safetensors: tensor {DOWN}_.* {message}"):
            check_folder(tmp_path)
    scales = torch.full_like(tensors[f"{DOWN}_scales"], 255)
    save_file({**tensors, f"{DOWN}_scales": scales}, path)
    with pytest.raises(ModelError, match=rf"{DOWN}: a scale is not a number"):
        make_chain(tmp_path)
    save_file({k: v for k, v in tensors.items() if "1.mlp.experts.down_proj_s" not in k}, path)
    with pytest.raises(ModelError, match=rf"tensor {DOWN}_scales is missing"):
        check_folder(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"swiglu_limit": 5.0}, "swiglu_limit 5.0 is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"rope_parameters": None}, "lacks the key 'rope_parameters'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "supported: mxfp4"),
        (
            {"quantization_config": {"quant_method": "mxfp4", "magic": 1}},
            r"quantization_config: magic is not supported \(it is 1\)",
        ),
    ],
)
def test_what_is_not_known_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    mxfp4_folders.write(tmp_path, **change)
    with pytest.raises(ModelError, match=message):
        check_folder(tmp_path)


@pytest.mark.parametrize(
    ("variant", "method", "message"),
    [
        ("llama", "mxfp4", "quant_method 'mxfp4' is not supported"),
        ("llama4", "mxfp4", "quantized folders of Llama4ForCausalLM are not supported; float"),
        ("granite-moe", "compressed-tensors", "quantized folders of GraniteMoeForCausalLM are not"),
        ("gpt-oss", "mxfp4", r"config\.json says mxfp4, but no expert is quantized"),
    ],
)
def test_what_a_family_is_not_stored_in_is_refused(
    tmp_path: Path, variant: str, method: str, message: str
) -> None:
    folder = tiny_models.write(tmp_path, variant)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        check_folder(folder)
