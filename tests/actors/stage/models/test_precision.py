"""Half precision: as close to the exact model as transformers' own half precision is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.scheduling.request import SamplingParams
from actors.stage.models.config import ModelError
from actors.stage.runner import StageRunner
from actors.stage.spec import StageSpec
from kernels.interface import Batch
from kernels.torch.backend import TorchBackend
from tests import tiny_models
from tests.actors.stage.greedy_reference import make_prompts, skip_unless_available
from tests.actors.stage.mini_planner import MiniPlanner, make_chain, make_runner

LENGTHS = (17, 40, 63)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "variant",
    ["llama", "qwen2-sliding", "qwen3", "bloom", "gemma2", "gemma3", "youtu", "gemma4-unified"],
)
def test_prompt_logprobs(
    tiny_model: Callable[..., Path], variant: str, dtype: torch.dtype, backend: str
) -> None:
    skip_unless_available(backend)
    folder = tiny_model(variant, dtype=dtype)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    planner = MiniPlanner(make_chain(folder, backend=backend), chunk=9)
    prompts = make_prompts(LENGTHS)
    planner.run(prompts, params)
    # Weights rounded to half precision, arithmetic in float64: what all of them approximate.
    half = tiny_models.build(variant).to(dtype)
    exact = tiny_models.build(variant).to(dtype).double()
    ours, theirs = [], []
    for request_id, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            want = exact(ids).logits[0].log_softmax(-1)
            close = half(ids).logits[0].double().log_softmax(-1)
        for result in planner.results:
            for owner, first, entries in result.prompt_logprobs:
                if owner != request_id:
                    continue
                for position, entry in enumerate(entries, start=first):
                    right = want[position - 1, entry.token].item()
                    ours.append(entry.logprob - right)
                    theirs.append(close[position - 1, entry.token].item() - right)
    assert len(ours) == sum(LENGTHS) - len(LENGTHS)
    our_error = torch.tensor(ours).square().mean().sqrt().item()
    their_error = torch.tensor(theirs).square().mean().sqrt().item()
    assert our_error < 1.3 * their_error


def test_a_temperature_of_queries_is_rounded_once(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the temperature before the product and the product too."""
    rotated: list[torch.Tensor] = []
    pairs: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    rope, attention = TorchBackend.rope_and_cache, TorchBackend.attention

    def noted_rope(self: TorchBackend, *arguments: Any) -> torch.Tensor:
        rotated.append(rope(self, *arguments))
        return rotated[-1]

    def noted_attention(
        self: TorchBackend, q_TND: torch.Tensor, batch: Batch, *arguments: Any
    ) -> torch.Tensor:
        pairs.append((rotated[-1].clone(), q_TND.clone(), batch.positions_T.clone()))
        return attention(self, q_TND, batch, *arguments)

    monkeypatch.setattr(TorchBackend, "rope_and_cache", noted_rope)
    monkeypatch.setattr(TorchBackend, "attention", noted_attention)
    folder = tiny_model("llama4", dtype=torch.bfloat16)
    MiniPlanner(make_chain(folder, backend="torch")).run(
        make_prompts((63,)), SamplingParams(max_tokens=1)
    )
    num_scaled = 0
    for before, scaled, positions in pairs:
        if not torch.equal(before, scaled):
            # As transformers' Llama4TextAttention, of the variant's floor_scale and attn_scale.
            scales = torch.log1p(torch.floor((positions.float() + 1.0) / 8)) * 0.3 + 1.0
            assert torch.equal(scaled, (before * scales[:, None, None]).to(torch.bfloat16))
            num_scaled += 1
    assert num_scaled


def test_dtype_may_be_chosen(tiny_model: Callable[..., Path]) -> None:
    """float32 arithmetic on a folder of bfloat16 weights."""
    folder = tiny_model("llama", dtype=torch.bfloat16)
    model = tiny_models.build("llama").to(torch.bfloat16).float()
    prompt = make_prompts((40,))[0]
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)
    greedy = SamplingParams(max_tokens=24, stop_token_ids=(tiny_models.EOS_TOKEN_ID,))
    for options in ({"dtype": "float32"}, {"dtype": "float32", "kv_dtype": "float32"}):
        planner = MiniPlanner(make_chain(folder, **options))
        assert planner.run([prompt], greedy) == [ids[0, 40:].tolist()]


def logprobs(folder: Path, **options: object) -> torch.Tensor:
    """Log-probabilities of all prompt tokens, in a fixed order."""
    planner = MiniPlanner(make_chain(folder, **options))
    planner.run(make_prompts(LENGTHS), SamplingParams(max_tokens=1, prompt_logprobs=0))
    found = {
        (owner, first + i): entry.logprob
        for result in planner.results
        for owner, first, entries in result.prompt_logprobs
        for i, entry in enumerate(entries)
    }
    return torch.tensor([found[key] for key in sorted(found)])


def difference(folder: Path, change: dict[str, str], **options: object) -> float:
    """Root mean square of what a change of options does to the log-probabilities."""
    changed, plain = logprobs(folder, **change, **options), logprobs(folder, **options)
    return (changed - plain).square().mean().sqrt().item()


@pytest.mark.parametrize(
    "variant",
    [
        "phi3", "olmo2", "smollm3", "gemma2", "gemma3", "falcon-40b", "gpt2", "cohere2", "bloom-6",
        "ministral3", "hunyuan", "nemotron", "gptj", "olmo",
    ],
)  # fmt: skip
def test_fused_layers_are_their_operations_bit_by_bit(
    tiny_model: Callable[..., Path], variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_unless_available("cpu")
    folder = tiny_model(variant, dtype=torch.bfloat16)
    fused = logprobs(folder, backend="cpu")
    monkeypatch.setattr("kernels.cpu.backend.CpuBackend.decoder_stack", lambda *arguments: None)
    assert torch.equal(logprobs(folder, backend="cpu"), fused)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_weights_stay_close(
    tiny_model: Callable[..., Path], quantization: str, backend: str
) -> None:
    """Not equal tokens, but a distribution near the exact one's: int8 nearer than int4."""
    skip_unless_available(backend)
    error = difference(tiny_model("llama"), {"quantization": quantization}, backend=backend)
    low, high = {"int8": (1e-4, 0.1), "int4": (0.1, 1.2)}[quantization]
    assert low < error < high


def test_int8_caches_stay_close(tiny_model: Callable[..., Path]) -> None:
    skip_unless_available("cpu")
    folder = tiny_model("llama")
    assert 1e-4 < difference(folder, {"kv_dtype": "int8"}, backend="cpu") < 0.1
    small, whole = (
        StageRunner(StageSpec(str(folder), backend="cpu", kv_dtype=kind)).info.kv_block_bytes
        for kind in ("int8", "auto")
    )
    assert small < 0.4 * whole


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8", "float64"])
def test_a_cache_that_the_backend_lacks_is_refused(
    tiny_model: Callable[..., Path], kv_dtype: str
) -> None:
    message = rf"^kv.dtype: backend 'torch' has no '{kv_dtype}'; it has auto, float32"
    with pytest.raises(ModelError, match=message):
        make_runner(tiny_model("llama"), kv_dtype=kv_dtype)
