"""GPTQ and AWQ folders give the tokens of the dense model that they stand for."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from actors.scheduling.request import SamplingParams
from actors.stage.folder_check import check_folder
from actors.stage.loaded_model import load_model
from actors.stage.models.config import ModelError
from actors.stage.runner import StageRunner
from actors.stage.spec import StageSpec
from actors.stage.weights import quantized
from kernels.cpu.quantize import quantize
from kernels.gptq_awq import unpack_gptq
from kernels.quantized import fake_quantize
from kernels.torch.linear import TorchQuantizedLinear
from tests.actors.stage.greedy_reference import generate, make_prompts, skip_unless_available
from tests.actors.stage.mini_planner import MiniPlanner, make_chain
from tests.actors.stage.weights import packed_folders
from tests.actors.stage.weights.linears import linears

LENGTHS = (3, 17, 40)
TOKENS = 10
GREEDY = SamplingParams(max_tokens=TOKENS)


def answers(model: PreTrainedModel, by_length: bool = False) -> list[list[int]]:
    """by_length: see `BY_LENGTH`."""
    prompts = make_prompts(LENGTHS)
    return [
        answer
        for part in ([[prompt] for prompt in prompts] if by_length else [prompts])
        for answer in generate(model, part, TOKENS, eos_token_id=None)
    ]


Write = Callable[[Path, str, str], PreTrainedModel]
Written = Callable[..., tuple[Path, list[list[int]]]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """`written(write, method)` is a folder and its answers, made once for all backends."""

    @functools.cache
    def get(write: Write, method: str, variant: str = "llama") -> tuple[Path, list[list[int]]]:
        folder = tmp_path_factory.mktemp("written")
        return folder, answers(write(folder, method, variant))

    return get


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("method", packed_folders.METHODS)
def test_greedy(written: Written, method: str, backend: str) -> None:
    skip_unless_available(backend)
    folder, right = written(packed_folders.write, method)
    planner = MiniPlanner(make_chain(folder, backend=backend))
    assert planner.run(make_prompts(LENGTHS), GREEDY) == right


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize(
    ("method", "variant"),
    [("gptq", "qwen3-moe"), ("gptq-8", "olmoe"), ("gptq-act-order", "olmoe"), ("awq", "qwen2-moe")],
)
def test_mixtures(written: Written, method: str, variant: str, backend: str) -> None:
    skip_unless_available(backend)
    folder, right = written(packed_folders.write, method, variant)
    planner = MiniPlanner(make_chain(folder, 2, backend=backend), feeds=True)
    assert planner.run(make_prompts(LENGTHS), GREEDY) == right


@pytest.mark.parametrize("method", ["awq", "gptq-act-order"])
def test_layers_with_states(tmp_path: Path, method: str) -> None:
    """Rows of queries, keys, values and gates are taken from packed tensors, in their groups."""
    skip_unless_available("cpu")
    model = packed_folders.write(tmp_path, method, "qwen3-next", group=16)
    planner = MiniPlanner(make_chain(tmp_path, backend="cpu"))
    assert planner.run(make_prompts(LENGTHS), GREEDY) == answers(model)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("method", ["gptq", "gptq-act-order", "awq"])
def test_a_last_group_may_have_fewer_inputs(tmp_path: Path, method: str, backend: str) -> None:
    """64 inputs are groups of 40 and 24, which equal parts would be in number too."""
    skip_unless_available(backend)
    model = packed_folders.write(tmp_path, method, group=40)
    path = tmp_path / "model.safetensors"
    if method == "gptq":  # which older tools leave out
        tensors = load_file(path)
        save_file({n: t for n, t in tensors.items() if not n.endswith(".g_idx")}, path)
    planner = MiniPlanner(make_chain(tmp_path, backend=backend))
    assert planner.run(make_prompts(LENGTHS), GREEDY) == answers(model)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_groups_of_another_size_than_the_config_s_are_refused(tmp_path: Path, method: str) -> None:
    packed_folders.write(tmp_path, method)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for size, message in (
        (64, r"layer model\.layers.*: \w+ has shape .* with 4 bits and group_size 64 has "),
        ("32", r"config\.json: quantization_config: group_size '32' is not a size"),
    ):
        config["quantization_config"]["group_size"] = size
        path.write_text(json.dumps(config))
        refused(tmp_path, message)


@pytest.mark.parametrize("method", ["gptq", "gptq-8", "awq"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_weights_take_the_bytes_of_the_file(tmp_path: Path, method: str, backend: str) -> None:
    """Codes and scales as stored; a zero point takes a byte."""
    skip_unless_available(backend)
    packed_folders.write(tmp_path, method)
    spec = StageSpec(str(tmp_path), backend=backend, dtype="bfloat16")
    layers = load_model(spec, lambda fraction: None).weights.layers
    linears = [each for w in layers for each in (w.qkv, w.out, w.gate_up, w.down)]
    held = [each.packed for each in linears if isinstance(each, TorchQuantizedLinear)]
    assert len(held) == len(linears)
    tensors = load_file(tmp_path / "model.safetensors")
    codes = sum(t.nbytes for name, t in tensors.items() if name.endswith(".qweight"))
    groups = sum(t.numel() for name, t in tensors.items() if name.endswith(".scales"))
    num_bytes = sum(packed.num_bytes for packed in held)
    assert num_bytes == codes + 3 * groups
    in_bfloat16 = 2 * sum(packed.in_features * packed.out_features for packed in held)
    assert num_bytes < in_bfloat16 * (0.6 if method == "gptq-8" else 0.35)


def test_biases_and_stages(tmp_path: Path) -> None:
    """Qwen's q, k and v biases stand beside the packed weights."""
    model = packed_folders.write(tmp_path, "awq", "qwen2")
    planner = MiniPlanner(make_chain(tmp_path, 3), feeds=True)
    assert planner.run(make_prompts(LENGTHS), GREEDY) == answers(model)


def refused(folder: Path, message: str, **spec: object) -> None:
    if not spec:  # known before anything is loaded
        with pytest.raises(ModelError, match=message):
            check_folder(folder)
    with pytest.raises(ModelError, match=message):
        StageRunner(StageSpec(str(folder), backend="torch", **spec))  # type: ignore[arg-type]


def test_foreign_formats_are_refused(tmp_path: Path) -> None:
    packed_folders.write(tmp_path, "gptq")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for change, message in (
        ({"bits": 3}, r"config\.json: quantization_config: bits 3 of GPTQ; supported: 4 and 8"),
        ({"rotation": "hadamard"}, r"quantization_config: rotation is not supported .it is hadam"),
        ({"dynamic": {"+:.*down.*": {"bits": 8}}}, "quantization_config: dynamic is not supported"),
        ({"bits": None}, r"config\.json: quantization_config: bits None of GPTQ"),
        ({"quant_method": "awq", "bits": None}, "AWQ other than 4 bits, version gemm"),
        ({"quant_method": None}, r"config\.json: quantization_config lacks the key 'quant_method'"),
        ({"checkpoint_format": "marlin"}, "GPTQ format 'marlin'; supported: gptq, gptq_v2"),
        ({"quant_method": "awq", "version": "gemv"}, "AWQ other than 4 bits, version gemm"),
    ):
        quantization = {**config["quantization_config"], **change}
        path.write_text(json.dumps({**config, "quantization_config": quantization}))
        refused(tmp_path, message)


def test_keys_of_published_folders_are_known(tmp_path: Path) -> None:
    """Of GPTQModel and AutoGPTQ, of optimum, and of AutoAWQ and transformers."""
    gptq = {
        "damp_auto_increment": 0.0025, "damp_percent": 0.01, "desc_act": False, "dynamic": None,
        "lm_head": False, "meta": {"quantizer": ["gptqmodel:1.2.3"], "uri": "x"}, "sym": True,
        "pack_dtype": "int32", "static_groups": False, "true_sequential": True,
        "model_file_base_name": "model", "model_name_or_path": "x",
    }  # fmt: skip
    optimum = {
        "batch_size": 1, "block_name_to_quantize": "model.layers", "cache_block_outputs": True,
        "dataset": ["x"], "exllama_config": {"version": 1}, "max_input_length": None,
        "module_name_preceding_first_block": ["model.embed_tokens"], "modules_in_block_to_quantize":
        [["self_attn.q_proj"]], "tokenizer": None, "use_cuda_fp16": False, "use_exllama": True,
        "dynamic": {"-:.*mlp.gate.*": {}},
    }  # fmt: skip
    awq = {
        "backend": "autoawq", "do_fuse": False, "exllama_config": None, "fuse_max_seq_len": None,
        "modules_to_fuse": None, "modules_to_not_convert": ["mlp.gate"], "zero_point": True,
    }  # fmt: skip
    for method, more in (("gptq", gptq), ("gptq", optimum), ("awq", awq)):
        packed_folders.write(tmp_path, method)
        path = tmp_path / "config.json"
        config = json.loads(path.read_text())
        config["quantization_config"] |= more
        path.write_text(json.dumps(config))
        assert method in check_folder(tmp_path)


@pytest.mark.parametrize("ending", ["qweight", "qzeros", "scales"])
@pytest.mark.parametrize("method", ["gptq", "gptq-8", "awq"])
def test_tensors_of_another_shape_are_named(tmp_path: Path, method: str, ending: str) -> None:
    packed_folders.write(tmp_path, method)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.down_proj"
    wide = torch.cat([tensors[f"{name}.{ending}"]] * 2, dim=1)
    save_file({**tensors, f"{name}.{ending}": wide}, path)
    refused(tmp_path, rf"model\.safetensors: layer {name}: {ending} has shape ")


def test_broken_layers_are_named(tmp_path: Path) -> None:
    packed_folders.write(tmp_path, "gptq")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.down_proj"
    save_file({k: v for k, v in tensors.items() if k != f"{name}.scales"}, path)
    refused(tmp_path, rf"tensor {name}\.scales is missing")
    short = tensors[f"{name}.qweight"][:-4].contiguous()
    save_file({**tensors, f"{name}.qweight": short}, path)
    refused(tmp_path, rf"model\.safetensors: layer {name}")


def test_a_config_that_promises_what_is_not_there(tmp_path: Path) -> None:
    packed_folders.write(tmp_path, "gptq")
    dense = packed_folders.tiny_models.build("llama").state_dict()
    save_file({k: v.clone() for k, v in dense.items()}, tmp_path / "model.safetensors")
    refused(tmp_path, r"config\.json says gptq, but no layer is quantized")


def test_input_order_cannot_be_split_over_ranks(tmp_path: Path) -> None:
    packed_folders.write(tmp_path, "gptq-act-order")
    refused(tmp_path, "o_proj: inputs in act order cannot be divided", tensor_ranks=2)


@pytest.mark.parametrize(("method", "variant"), [("awq", "phi3"), ("gptq-act-order", "glm4")])
def test_fused_tensors_and_turned_features(tmp_path: Path, method: str, variant: str) -> None:
    """Rows of packed tensors are cut and reordered as those of dense ones are."""
    skip_unless_available("cpu")
    model = packed_folders.write(tmp_path, method, variant)
    planner = MiniPlanner(make_chain(tmp_path, backend="cpu"))
    assert planner.run(make_prompts(LENGTHS), GREEDY) == answers(model)


def test_a_layer_taken_in_pieces_is_unpacked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries, keys and values of Phi-3 are rows of one tensor, gate and up of another."""
    packed_folders.write(tmp_path, "awq", "phi3")
    calls = packed_folders.count_calls(monkeypatch, quantized, "unpack_awq")
    make_chain(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert len(calls) == sum(name.endswith(".qweight") for name in tensors)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_mixtures_rounded_at_load(tmp_path: Path, quantization: str, backend: str) -> None:
    """Each backend has its grid: the CPU library chooses scales of least error."""
    skip_unless_available(backend)

    def rounded(weight_OK: torch.Tensor, kind: str) -> torch.Tensor:
        if backend == "cpu":
            return quantize(weight_OK, kind).dequantize(torch.float32)
        return fake_quantize(weight_OK, kind)

    packed_folders.tiny_models.write(tmp_path, "qwen3-moe")
    model = packed_folders.tiny_models.build("qwen3-moe")
    for _, weight_OK in linears(model):
        weight_OK.copy_(rounded(weight_OK, quantization))
    model.lm_head.weight.data.copy_(rounded(model.lm_head.weight.data, "int8"))
    run = make_chain(tmp_path, 2, backend=backend, quantization=quantization)
    planner = MiniPlanner(run, feeds=True)
    assert planner.run(make_prompts(LENGTHS), GREEDY) == answers(model)


def test_unpacking_makes_no_wider_copy_of_the_values() -> None:
    """A layer of a large model is unpacked by every rank at the same time."""
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal largest
            made = func(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor):
                largest = max(largest, made.untyped_storage().nbytes())
            return made

    words = torch.randint(-(1 << 31), 1 << 31, (64, 256)).int()
    scales, zeros = torch.ones(8, 256).half(), torch.zeros(8, 32).int()
    for bits in (4, 8):
        largest, per_word = 0, 32 // bits
        with Sizes():
            wide, group = zeros.repeat(1, 8 // per_word), 8 * per_word
            made = unpack_gptq(words, wide, scales, None, bits, group_size=group)
        assert largest <= 2 * words.numel() * per_word
        shifts = torch.arange(0, 32, bits)
        stored = words.long()[:, None] >> shifts[:, None] & ((1 << bits) - 1)
        assert torch.equal(made.values_OK.T + (1 << (bits - 1)), stored.flatten(0, 1).char())
