"""Folders whose inputs are rounded to 8 bits give, by the Triton kernels, the tokens of
transformers with inputs rounded by the reference, and keep the bytes of the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from actors.scheduling.request import SamplingParams
from actors.stage.loaded_model import load_model
from actors.stage.models.config import ModelError
from actors.stage.spec import StageSpec
from kernels.packing import pack_weight
from kernels.quantized import InputRounding, QuantizedWeight
from kernels.triton import backend as triton_backend
from tests import swift_interpreter
from tests.actors.stage.greedy_reference import make_prompts, skip_unless_available
from tests.actors.stage.mini_planner import MiniPlanner, make_chain
from tests.actors.stage.weights import scaled_folders

triton = pytest.importorskip("triton", reason="Triton is not installed: its kernels do the sums")
rounded = pytest.importorskip("kernels.triton.rounded")
swift_interpreter.install()

LENGTHS = (3, 21)
NUM_TOKENS = 4
# Method of the folder, setting, and how inputs are rounded.
FOLDERS: list[tuple[str, str, InputRounding]] = [
    ("w8a8", "w8a8", "token"),
    ("fp8-channel", "fp8_w8a8", "token"),
    ("fp8-tensor", "fp8_w8a8", "token"),
    ("fp8-block", "fp8_w8a8", "group"),
    ("deepseek", "fp8_w8a8", "group"),
]


def rounding(
    model: transformers.PreTrainedModel, how: InputRounding
) -> transformers.PreTrainedModel:
    """The dense model, its linear layers' inputs rounded, and its head as it is stored at load."""
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        weight = module.weight.data
        if name != "lm_head":
            group = scaled_folders.BLOCK if how == "group" else 0
            num_groups = -(-weight.shape[1] // group) if group else 1
            stored = QuantizedWeight(
                weight.to(torch.float8_e4m3fn),
                torch.ones(weight.shape[0], num_groups), 8, group, input_rounding=how,
            )  # fmt: skip
        else:
            module.weight = torch.nn.Parameter(pack_weight(weight, "int8").dequantize(weight.dtype))
            continue

        def hook(
            _: torch.nn.Module, given: tuple[torch.Tensor], stored: QuantizedWeight = stored
        ) -> tuple[torch.Tensor]:
            (x,) = given
            return (stored.round_inputs(x.flatten(0, -2)).view(x.shape),)

        module.register_forward_pre_hook(hook)
    return model


def test_integers_are_those_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage's tokens with products of integers in torch, which are the same bits: after another
    library's norms a number may round to the next integer, and a random model's tokens differ."""
    skip_unless_available("triton")
    scaled_folders.write(tmp_path, "w8a8")
    greedy = SamplingParams(max_tokens=NUM_TOKENS)

    def tokens() -> list[list[int]]:
        chain = make_chain(tmp_path, backend="triton", quantization="w8a8")
        return MiniPlanner(chain).run(make_prompts(LENGTHS), greedy)

    made, calls = tokens(), []

    def multiply(layer: Any, x_TK: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        calls.append(layer)
        scale_T1 = x_TK.abs().amax(1, keepdim=True) / 127.5
        codes_TK = (x_TK * (1 / scale_T1)).round().clamp(-128, 127).long()
        sums_TO = (codes_TK @ layer.codes_OK.long().T).float()
        y_TO = sums_TO * scale_T1 * layer.scales_OG.T
        return (y_TO if layer.bias_O is None else y_TO + layer.bias_O).to(dtype)

    monkeypatch.setattr(rounded.RoundedLinear, "_multiply", multiply)
    assert tokens() == made
    assert calls


# In the short run one folder for each way of rounding; the others differ in how weights are stored.
SHORT = ("fp8-channel", "deepseek")


@pytest.mark.parametrize(
    ("method", "quantization", "how"),
    [
        pytest.param(*folder, marks=[] if folder[0] in SHORT else [pytest.mark.long])
        for folder in FOLDERS[1:]
    ],
)
def test_greedy(tmp_path: Path, method: str, quantization: str, how: InputRounding) -> None:
    skip_unless_available("triton")
    model = rounding(scaled_folders.write(tmp_path, method), how)
    expected = []
    for prompt in make_prompts(LENGTHS):
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS,
            do_sample=False, eos_token_id=None,
        )  # fmt: skip
        expected.append(ids[0, len(prompt) :].tolist())
    planner = MiniPlanner(make_chain(tmp_path, backend="triton", quantization=quantization))
    greedy = SamplingParams(max_tokens=NUM_TOKENS)
    assert planner.run(make_prompts(LENGTHS), greedy) == expected


@pytest.mark.parametrize(("method", "quantization", "how"), FOLDERS)
def test_weights_take_the_bytes_of_the_file(
    tmp_path: Path, method: str, quantization: str, how: InputRounding
) -> None:
    """A byte for each number, and a float32 scale for each output and group."""
    skip_unless_available("triton")
    scaled_folders.write(tmp_path, method)
    spec = StageSpec(str(tmp_path), backend="triton", dtype="float16", quantization=quantization)
    layers = load_model(spec, lambda fraction: None).weights.layers
    linears = [each for w in layers for each in (w.qkv, w.out, w.gate_up, w.down)]
    for linear in linears:
        assert isinstance(linear, rounded.RoundedLinear)
        group = scaled_folders.BLOCK if how == "group" else linear.in_features
        numbers = linear.in_features + 4 * -(-linear.in_features // group)
        assert linear.num_bytes == linear.out_features * numbers


def test_an_old_gpu_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_unless_available("triton")
    scaled_folders.write(tmp_path, "fp8-channel")
    monkeypatch.setattr(triton_backend, "target_arch", lambda: 80)
    message = "model.quantization: 'fp8_w8a8' needs a GPU of compute capability 8.9, not 8.0"
    with pytest.raises(ModelError, match=message):
        make_chain(tmp_path, backend="triton", quantization="fp8_w8a8")
