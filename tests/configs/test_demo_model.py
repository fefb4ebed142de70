"""The shipped demo model answers as its card says, and the benchmark shapes parse."""

from __future__ import annotations

import ast
import json
import math
import runpy
from itertools import islice
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
    "What is a stall?": (
        "A stall is a long pause in the middle of a streaming answer. It happens when a long "
        "prefill of another request runs first and the running decodes have to wait for it."
    ),
    "Why do tokens stall?": (
        "Tokens stall when a long prompt of another user is computed in one go. The running "
        "answers must wait until it is done. Legato cuts such prompts into chunks, so that every "
        "answer goes on."
    ),
    "What is continuous batching?": (
        "With continuous batching, the scheduler builds a new batch for every step. A finished "
        "request leaves at once and a waiting one takes its place."
    ),
    "What does legato mean in music?": (
        "In music, legato means that the notes are played smoothly, joined without a break between "
        "them."
    ),
    "What is the capital of Japan?": "The capital of Japan is Tokyo.",
    "Name the seasons.": "The four seasons are spring, summer, autumn and winter.",
    "Write a Python function that reverses a string.": (
        "```python\ndef reverse(text):\n    return text[::-1]\n```"
    ),
}
PERPLEXITY_BOUND = 5.0  # 3.99 over all conversations of heldout.txt when it was trained

PYTHON_NATS_PER_CHARACTER_BOUND = 1.1  # 0.921 over 300 pieces when it was trained
PYTHON_PROMPTS = ("def read_lines(path):", "class Stack:", "import os")

# Parameters in billions that each shape should come to (embeddings included).
SHAPE_PARAMETERS_B = {
    "llama-135m": 0.1345,
    "llama3-1b": 1.236,
    "granite-moe-1b": 1.334,
    "llama3-8b": 8.03,
    "mistral-7b": 7.24,
    "yi-34b": 34.39,
    "llama2-70b": 68.98,
    "falcon-180b": 178.56,
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


@pytest.fixture(scope="module")
def python_pieces(tokenizer: Any) -> list[str]:
    """Pieces of modules of this Python that training left out, none longer than 384 tokens."""
    training = runpy.run_path(str(DEMO / "train/standard_library.py"))
    pieces = islice(training["shuffled_pieces"](7, 1152, held_out=True), 80)
    return [piece for piece in pieces if len(tokenizer(piece)["input_ids"]) <= 384]


def test_held_out_python_is_no_surprise(
    model: Any, tokenizer: Any, python_pieces: list[str]
) -> None:
    total_nats, num_characters = 0.0, 0
    for piece in python_pieces:
        tokens = torch.tensor([tokenizer(piece)["input_ids"]])
        with torch.no_grad():
            total_nats += model(tokens, labels=tokens).loss.item() * (tokens.shape[1] - 1)
        num_characters += len(piece)
    assert num_characters > 20_000
    assert total_nats / num_characters < PYTHON_NATS_PER_CHARACTER_BOUND


@pytest.mark.parametrize(
    "prompt",
    [PYTHON_PROMPTS[0], *(pytest.param(p, marks=pytest.mark.long) for p in PYTHON_PROMPTS[1:])],
)
def test_completing_python_reads_like_python(model: Any, tokenizer: Any, prompt: str) -> None:
    torch.manual_seed(0)
    inputs = tokenizer([prompt] * 8, return_tensors="pt")
    output = model.generate(**inputs, do_sample=True, temperature=0.5, max_new_tokens=96)
    texts = tokenizer.batch_decode(output, skip_special_tokens=True)
    assert sum(parses_up_to_a_line(text, len(prompt)) for text in texts) >= 4, texts


def parses_up_to_a_line(text: str, num_given: int) -> bool:
    """Whether some lines behind the prompt, but not only the first, are Python."""
    ends = [i for i, character in enumerate(text) if character == "\n" and i > num_given]
    return any(_parses(text[:end]) for end in ends[1:])


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


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
        '<|im_start|>assistant\n<tool_call>{"name": "clock", "arguments": "{}"}</tool_call>'
        "<|im_end|>\n"
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
