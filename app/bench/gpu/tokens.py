"""Greedy tokens of tiny random models against transformers, through a whole stage."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from actors.scheduling.plan import RequestStart, Slice, StepPlan, StepResult
from actors.scheduling.request import SamplingParams
from actors.stage.runner import StageRunner
from actors.stage.spec import StageSpec

_SIZES = {
    "vocab_size": 263,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.25,  # wide, so that continuations vary
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral, window of 16": ("Mistral", {"sliding_window": 16}),
    "qwen3, q and k norm": ("Qwen3", {"head_dim": 32}),
    "mixtral, experts": ("Mixtral", {"num_local_experts": 4}),
}
_PROMPT_LENGTHS = (5, 40, 77)
_NUM_TOKENS = 16


@dataclass(frozen=True, slots=True)
class TokenCheck:
    """num_equal of num_tokens greedy tokens are those of transformers in float32."""

    model: str
    backend: str
    dtype: str
    graphs: bool
    num_equal: int
    num_tokens: int

    @property
    def passed(self) -> bool:
        """In float32 every token; in half precision near ties may fall the other way."""
        share = 1.0 if self.dtype == "float32" else 0.5
        return self.num_equal >= share * self.num_tokens


def check_tokens(
    device: str, backend: str, dtype: str, block_size: int, names: Iterable[str] = MODELS
) -> Iterator[TokenCheck]:
    """Check all models on one backend, with CUDA graphs and without (on a GPU)."""
    generator = torch.Generator().manual_seed(5)
    prompts = [
        tuple(torch.randint(0, 256, (n,), generator=generator).tolist()) for n in _PROMPT_LENGTHS
    ]
    for name in names:
        family, extra = MODELS[name]
        with tempfile.TemporaryDirectory() as folder:
            expected = _reference(Path(folder), family, extra, prompts)
            for graphs in (True, False) if device == "cuda" else (False,):
                spec = StageSpec(
                    folder,
                    dtype=dtype,
                    backend=backend,
                    device=device,
                    block_size=block_size,
                    max_requests=4,
                    max_model_len=256,
                    cuda_graphs=graphs,
                    graph_tokens=256,
                )
                answers = _generate(spec, prompts)
                equal = sum(
                    ours == theirs
                    for answer, wanted in zip(answers, expected, strict=True)
                    for ours, theirs in zip(answer, wanted, strict=True)
                )
                total = _NUM_TOKENS * len(prompts)
                yield TokenCheck(name, backend, dtype, graphs, equal, total)


def _reference(
    folder: Path, family: str, extra: dict[str, Any], prompts: list[tuple[int, ...]]
) -> list[list[int]]:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**_SIZES, **extra})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    model.save_pretrained(folder)
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        answer = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=_NUM_TOKENS,
            do_sample=False,
        )
        answers.append(answer[0, len(prompt) :].tolist())
    return answers


def _generate(spec: StageSpec, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    """Prompts enter one step after another and decode together: hybrid steps, then decodes."""
    runner = StageRunner(spec)
    per_request = -(-spec.max_model_len // spec.block_size)
    runner.allocate(len(prompts) * per_request)
    answers: list[list[int]] = [[] for _ in prompts]
    for step in range(len(prompts) + _NUM_TOKENS - 1):
        started, decodes, chunks = [], [], []
        for i, prompt in enumerate(prompts):
            position = len(prompt) + len(answers[i]) - 1
            if i == step:
                blocks = tuple(range(i * per_request, (i + 1) * per_request))
                sampling = SamplingParams(_NUM_TOKENS)
                started.append(RequestStart(i, prompt, len(prompt), blocks, sampling))
                chunks.append(Slice(i, 0, len(prompt), True))
            elif i < step and len(answers[i]) < _NUM_TOKENS:
                decodes.append(Slice(i, position, 1, True))
        plan = StepPlan(step, (*decodes, *chunks), started=tuple(started))
        result = runner.execute(plan, None)
        if isinstance(result, StepResult):
            for request_id, token in result.tokens:
                answers[request_id].append(token)
    runner.close()
    return answers
