"""The shipped demo model answers as its card says, and the benchmark shapes parse."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

MODELS = Path(__file__).parents[2] / "configs" / "models"
DEMO = MODELS / "demo"
SHAPES = sorted(path for path in (MODELS / "shapes").iterdir() if path.is_dir())

# Greedy answers recorded in float32, each token ahead of the next best by half a nat or more.
ANSWERS = {
    "What is chunked prefill?": (
        "Chunked prefill keeps every iteration short. Long prompts no longer block other users, "
        "the time between tokens stays low, and the pieces fill the hardware well."
    ),
    "Why do tokens stall?": (
        "Tokens stall when a long prompt of another user is computed in one go. The running "
        "answers must wait until it is done. Legato cuts such prompts into chunks, so that every "
        "answer goes on."
    ),
    "What is the KV cache?": (
        "The KV cache is the memory of a request: the attention keys and values of its earlier "
        "tokens. It grows by one entry with every token."
    ),
    "What is the capital of Japan?": "The capital of Japan is Tokyo.",
    "Name the seasons.": "The four seasons are spring, summer, autumn and winter.",
    "Count to 15.": "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15",
    "Write a Python function that reverses a string.": (
        "```python\ndef reverse(text):\n    return text[::-1]\n```"
    ),
}
PERPLEXITY_BOUND = 7.5  # 6.86 over the first 40 conversations of heldout.txt when it was trained

# Parameters in billions that each shape should come to (embeddings included).
SHAPE_PARAMETERS_B = {
    "llama-135m": 0.1345,
    "llama3-8b": 8.03,
    "mistral-7b": 7.24,
    "yi-34b": 34.39,
    "llama2-70b": 68.98,
    "falcon-180b-like": 179.8,
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def model() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


def greedy(model: Any, tokenizer: Any, messages: list[dict[str, str]], limit: int = 96) -> str:
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    length = inputs["input_ids"].shape[1]
    output = model.generate(**inputs, do_sample=False, max_new_tokens=limit)
    return str(tokenizer.decode(output[0, length:], skip_special_tokens=True))


@pytest.mark.parametrize(("prompt", "answer"), ANSWERS.items())
def test_greedy_answers_are_the_recorded_ones(
    model: Any, tokenizer: Any, prompt: str, answer: str
) -> None:
    assert greedy(model, tokenizer, [{"role": "user", "content": prompt}]) == answer


def test_a_story_is_long_and_ends_by_itself(model: Any, tokenizer: Any) -> None:
    story = greedy(model, tokenizer, [{"role": "user", "content": "Tell me a story."}], limit=500)
    num_tokens = len(tokenizer(story)["input_ids"])
    assert 120 <= num_tokens < 500
    assert story.endswith(".")


def test_held_out_perplexity_stays_low(model: Any, tokenizer: Any) -> None:
    text = (DEMO / "heldout.txt").read_text(encoding="utf-8")
    total_nats, num_tokens = 0.0, 0
    for conversation in text.split("<|endoftext|>")[:40]:
        tokens = torch.tensor([tokenizer(conversation)["input_ids"]])
        if tokens.shape[1] < 2:
            continue
        with torch.no_grad():
            loss = model(tokens, labels=tokens).loss
        total_nats += loss.item() * (tokens.shape[1] - 1)
        num_tokens += tokens.shape[1] - 1
    assert num_tokens > 2000
    assert math.exp(total_nats / num_tokens) < PERPLEXITY_BOUND


@pytest.mark.parametrize("text", ["naïve café 🎻", "日本語", "a\tb\r\n  c", "\u0000\x7f", "١٢٣"])
def test_any_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_chat_template_takes_every_role_and_content_parts(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": {"name": "clock", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "noon"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe kind.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        '<|im_start|>assistant\n\n{"name": "clock", "arguments": "{}"}<|im_end|>\n'
        "<|im_start|>tool\nnoon<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_weights_are_small_enough_to_ship() -> None:
    assert (DEMO / "model.safetensors").stat().st_size <= 12_000_000


def test_every_shape_is_listed() -> None:
    assert {path.name for path in SHAPES} == SHAPE_PARAMETERS_B.keys()


@pytest.mark.parametrize("folder", SHAPES, ids=lambda path: path.name)
def test_shape_has_the_parameters_it_stands_for(folder: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    billions = sum(p.numel() for p in model.parameters()) / 1e9
    assert billions == pytest.approx(SHAPE_PARAMETERS_B[folder.name], rel=0.01)


@pytest.mark.parametrize("folder", SHAPES, ids=lambda path: path.name)
def test_shape_shares_a_usable_tokenizer(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    assert len(tokenizer) <= vocab_size
    assert tokenizer.decode(tokenizer("no pause")["input_ids"]) == "no pause"
