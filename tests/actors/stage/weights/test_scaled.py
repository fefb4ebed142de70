"""Folders of compressed-tensors and float8 give the tokens of the dense model they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.stage.folder_check import check_folder
from actors.stage.models.config import ModelError
from actors.stage.models.read import load_config
from actors.stage.spec import StageSpec
from actors.stage.weights import scaled
from actors.stage.weights.folder import open_folder
from actors.stage.weights.names import all_shapes
from actors.stage.weights.source import WHOLE, Shard
from tests.actors.stage.greedy_reference import make_prompts, skip_unless_available
from tests.actors.stage.mini_planner import MiniPlanner, make_chain
from tests.actors.stage.rank_pool import RankPool
from tests.actors.stage.weights import packed_folders, scaled_folders
from tests.actors.stage.weights.test_packed import GREEDY, LENGTHS, Written, answers
from tests.actors.stage.weights.test_packed import written as written  # a fixture of this one too

LAYER = "model.layers.1.mlp.down_proj"


def packed_layers(folder: Path, ranks: int = 1) -> bool:
    config, spec = load_config(folder), StageSpec(str(folder), tensor_ranks=ranks)
    with open_folder(folder, config, spec, torch.float32) as (_, packed):
        return packed is not None and LAYER in packed


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("method", scaled_folders.METHODS)
def test_greedy(written: Written, method: str, backend: str) -> None:
    skip_unless_available(backend)
    folder, right = written(scaled_folders.write, method)
    planner = MiniPlanner(make_chain(folder, 2, backend=backend), feeds=True)
    assert planner.run(make_prompts(LENGTHS), GREEDY) == right
    assert packed_layers(folder) == method.startswith("w")


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize(
    ("method", "variant"),
    [
        ("w4a16", "qwen3-moe"),
        ("w4a16-asymmetric", "olmoe"),
        ("w8a8", "olmoe"),
        ("fp8-channel", "qwen3-moe"),
        ("fp8-block", "olmoe"),
        ("deepseek", "deepseek-v3"),  # latents, shared experts and a correction bias too
    ],
)
def test_mixtures(written: Written, method: str, variant: str, backend: str) -> None:
    skip_unless_available(backend)
    folder, right = written(scaled_folders.write, method, variant)
    planner = MiniPlanner(make_chain(folder, 2, backend=backend), feeds=True)
    assert planner.run(make_prompts(LENGTHS), GREEDY) == right


@pytest.mark.parametrize("method", ["w4a16", "w4a16-act-order", "w8a8", "deepseek"])
def test_two_ranks(tmp_path: Path, ranks: RankPool, method: str) -> None:
    """A rank's half of 96 inputs cuts a group of 32, and act order cannot be cut: both are then
    turned into floating point."""
    model = scaled_folders.write(tmp_path, method, "qwen2")
    ranks.make(tmp_path)
    assert MiniPlanner(ranks.execute).run(make_prompts(LENGTHS), GREEDY) == answers(model)
    assert packed_layers(tmp_path, 2) == (method == "w8a8")


@pytest.mark.parametrize("form", ["pack-quantized", "int-quantized"])
def test_a_last_group_may_have_fewer_inputs(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 inputs are groups of 40 and 24, which equal parts would be in number too."""
    uneven = scaled_folders.compressed(
        form, strategy="group", group_size=40, symmetric=form == "pack-quantized"
    )
    monkeypatch.setitem(scaled_folders.METHODS, "uneven", uneven)
    model = scaled_folders.write(tmp_path, "uneven")
    planner = MiniPlanner(make_chain(tmp_path))
    assert planner.run(make_prompts(LENGTHS), GREEDY) == answers(model)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_layer_taken_in_pieces_is_unpacked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """Also where ranks would cut its groups, and its rows are turned into floating point."""
    scaled_folders.write(tmp_path, "w4a16", "phi3")
    config, spec = load_config(tmp_path), StageSpec(str(tmp_path), tensor_ranks=ranks)
    layer = "model.layers.0.mlp.gate_up_proj"
    calls = packed_folders.count_calls(monkeypatch, scaled, "unpack_compressed")
    with open_folder(tmp_path, config, spec, torch.float32) as (source, packed):
        shape = all_shapes(config)[f"{layer}.weight"]
        pieces = [Shard(rows=(0, 96)), Shard(rows=(96, 192))]
        if packed is not None and layer in packed:
            found = [packed.read(layer, shape, part).dequantize(torch.float32) for part in pieces]
        else:
            found = [source.read(f"{layer}.weight", shape, part) for part in pieces]
        assert len(calls) == 1
        assert torch.equal(torch.cat(found), source.read(f"{layer}.weight", shape))


def test_scales_that_float16_does_not_hold_are_not_rounded(tmp_path: Path) -> None:
    model = scaled_folders.write(tmp_path, "w4a16")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors[f"{LAYER}.weight_scale"] *= 1.0001
    save_file(tensors, path)
    weight = dict(model.named_parameters())[f"{LAYER}.weight"]
    weight.data *= 1.0001
    assert not packed_layers(tmp_path)
    planner = MiniPlanner(make_chain(tmp_path))
    assert planner.run(make_prompts(LENGTHS), GREEDY) == answers(model)


def test_an_order_that_was_never_found_is_none(tmp_path: Path) -> None:
    """compressed-tensors begins with -1 for every column, and takes that for no order."""
    model = scaled_folders.write(tmp_path, "w4a16")
    rewrite(tmp_path, {}, {"actorder": "group"}, "w4a16")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    packed = [name for name in tensors if name.endswith(".weight_packed")]
    for name in packed:
        stem = name.removesuffix(".weight_packed")
        columns = tensors[f"{stem}.weight_shape"][1]
        tensors[f"{stem}.weight_g_idx"] = torch.full((columns,), -1, dtype=torch.int32)
    save_file(tensors, path)
    planner = MiniPlanner(make_chain(tmp_path))
    assert planner.run(make_prompts(LENGTHS), GREEDY) == answers(model)
    tensors[f"{LAYER}.weight_g_idx"][0] = 0
    save_file(tensors, path)
    with pytest.raises(ModelError, match=rf"layer {LAYER}: g_idx names group -1"):
        make_chain(tmp_path)


def rewrite(
    folder: Path, change: dict[str, Any], weights: dict[str, Any], method: str = "w8a8"
) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    stored = {**scaled_folders.METHODS[method], **change}
    group = stored["config_groups"]["group_0"]
    group = {**group, "weights": {**group["weights"], **weights}}
    stored["config_groups"] = {"group_0": group}
    path.write_text(json.dumps({**config, "quantization_config": stored}))


def test_what_is_not_known_is_refused_by_key_and_file(tmp_path: Path) -> None:
    scaled_folders.write(tmp_path, "w8a8")
    for change, weights, message in (
        ({"format": "marlin-24"}, {}, "group_0: format 'marlin-24' is not supported"),
        ({"sparsity_config": {"format": "sparse-24"}}, {}, "sparsity_config is not supported"),
        ({"kv_cache_scheme": {"num_bits": 8}}, {}, "kv_cache_scheme is not supported"),
        ({"quantization_status": "calibration"}, {}, "quantization_status 'calibration'"),
        ({}, {"num_bits": 3}, "weights: num_bits 3 is not supported; supported: 8"),
        ({}, {"dynamic": True}, "weights: dynamic True"),
        ({}, {"strategy": "attn_head"}, "strategy 'attn_head' is not supported"),
        ({}, {"magic": 1}, r"weights: magic is not supported \(it is 1\)"),
        ({}, {"strategy": "group"}, "group_size None is not a size"),
    ):
        rewrite(tmp_path, change, weights)
        with pytest.raises(ModelError, match=r"config\.json: quantization_config: ?.*" + message):
            check_folder(tmp_path)


@pytest.mark.parametrize("method", ["w4a16", "w8a8", "fp8-channel"])
def test_a_frozen_folder_is_read_if_its_tensors_are_stored_as_told(
    tmp_path: Path, method: str
) -> None:
    """Published ones say frozen beside compressed tensors, and dense beside no sparsity."""
    model = scaled_folders.write(tmp_path, method)
    dense = {"format": "dense", "global_sparsity": 0.14, "targets": []}
    rewrite(tmp_path, {"quantization_status": "frozen", "sparsity_config": dense}, {}, method)
    planner = MiniPlanner(make_chain(tmp_path))
    assert planner.run(make_prompts(LENGTHS), GREEDY) == answers(model)
    path = tmp_path / "model.safetensors"
    floats = {f"{LAYER}.weight": dict(model.named_parameters())[f"{LAYER}.weight"].detach()}
    tensors = {k: v for k, v in load_file(path).items() if k != f"{LAYER}.weight_packed"}
    save_file({**tensors, **floats}, path)
    with pytest.raises(
        ModelError, match=rf"{LAYER}(: its weight is stored as F32|\.weight_packed)"
    ):
        check_folder(tmp_path)


def test_the_key_of_2024_is_read_like_todays(tmp_path: Path) -> None:
    scaled_folders.write(tmp_path, "w8a8")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    stored = config.pop("quantization_config")
    path.write_text(json.dumps({**config, "compression_config": stored}))
    assert "compressed-tensors (int-quantized)" in check_folder(tmp_path)
    unknown = {**stored, "kv_cache_scheme": {"num_bits": 8}}
    path.write_text(json.dumps({**config, "compression_config": unknown}))
    with pytest.raises(ModelError, match=r"json: compression_config: kv_cache_scheme is not"):
        check_folder(tmp_path)
    path.write_text(json.dumps({**config, "compression_config": {"format": "dense"}}))
    with pytest.raises(ModelError, match=r"json: compression_config lacks the key 'quant_method'"):
        check_folder(tmp_path)


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    scaled_folders.write(tmp_path, "w8a8")
    assert "compressed-tensors (int-quantized)" in check_folder(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, f"{LAYER}.weight_scale": torch.ones(7, 1)}, path)
    with pytest.raises(ModelError, match=rf"model\.safetensors: tensor {LAYER}\.weight_scale of"):
        check_folder(tmp_path)
    save_file({k: v.float() for k, v in tensors.items() if "weight_scale" not in k}, path)
    with pytest.raises(ModelError, match=r"says compressed-tensors, but no layer is quantized"):
        check_folder(tmp_path)


@pytest.mark.parametrize(
    ("method", "scale"),
    [("w8a8", "weight_scale"), ("fp8-channel", "weight_scale"), ("deepseek", "weight_scale_inv")],
)
def test_a_layer_without_its_scale_is_not_read_as_if_that_were_one(
    tmp_path: Path, method: str, scale: str
) -> None:
    scaled_folders.write(tmp_path, method)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors[f"{LAYER}.{scale}"]
    save_file(tensors, path)
    with pytest.raises(ModelError, match=rf"safetensors: .*, but {LAYER}\.{scale} is missing"):
        check_folder(tmp_path)


def test_activations_are_rounded_where_that_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scaled_folders.write(tmp_path, "w8a8")
    config = load_config(tmp_path)
    for quantization, rounding in (("none", "none"), ("int8", "none"), ("w8a8", "token")):
        caplog.clear()
        spec = StageSpec(str(tmp_path), quantization=quantization)
        with open_folder(tmp_path, config, spec, torch.float32) as (_, packed):
            assert packed is not None
            assert packed.read(LAYER, (64, 96), WHOLE).input_rounding == rounding
        assert ("rounded activations" in caplog.text) == (rounding == "none")


def test_rounded_activations_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scaled_folders.write(tmp_path, "w4a16")
    check_folder(tmp_path)
    assert "activations" not in caplog.text
    scaled_folders.write(tmp_path, "w8a8")
    check_folder(tmp_path)
    assert "was made for rounded activations" in caplog.text


@pytest.mark.parametrize("method", ["w8a8", "w4a16", "deepseek"])
def test_layers_stored_as_in_by_out_are_refused(tmp_path: Path, method: str) -> None:
    """Square ones would fit and give other tokens."""
    scaled_folders.write(tmp_path, method, "gpt2")
    with pytest.raises(ModelError, match=r"config\.json: .* folders of GPT2LMHeadModel are not"):
        check_folder(tmp_path)
