"""What lm-eval's `local-completions` asks for, against log-softmax of plain transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoTokenizer

from tests import tiny_models
from tests.serve.live_server import LiveServer, live_server

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

# A local task: one context, several endings, of which the likeliest is the answer.
CONTEXTS = ("The token budget is", "Q: What is a stall?\nA:", "x")
ENDINGS = (" a number.", " a long pause in a stream", "é")


@pytest.fixture(scope="module")
def server(ray_cluster: None, tiny_model: Callable[..., Path]) -> Iterator[LiveServer]:
    # Chunks of 16: log-probabilities of a prompt are gathered over several steps.
    scheduling = {"token_budget": 16, "max_requests": 8}
    kv = {"block_size": 4, "memory_gib": 0.01}
    with live_server(tiny_model("llama"), scheduling=scheduling, kv=kv) as started:
        yield started


def expected(context: Sequence[int], ending: Sequence[int]) -> tuple[float, bool]:
    """Sum of the ending's log-probabilities, and whether greedy decoding would write it."""
    model = tiny_models.build("llama")
    ids = torch.tensor([[*context, *ending]])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[0].double(), -1)
    rows = logprobs[len(context) - 1 : -1]
    wanted = torch.tensor(list(ending))
    total = float(rows.gather(1, wanted[:, None]).sum())
    return total, bool((rows.argmax(-1) == wanted).all())


def greedy_ending(context: Sequence[int], count: int) -> list[int]:
    ids = list(context)
    model = tiny_models.build("llama")
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(context) :]


def pairs() -> list[tuple[list[int], list[int]]]:
    found = [(list(c.encode()), list(e.encode())) for c in CONTEXTS for e in ENDINGS]
    context = list(CONTEXTS[0].encode())
    return [*found, (context, greedy_ending(context, 5))]


def sums(body: Any, lengths: Sequence[int], *, generated: int) -> list[tuple[float, bool]]:
    """As lm-eval reads an answer: everything behind the context, the generated token left out."""
    answers = []
    choices = sorted(body["choices"], key=lambda choice: choice["index"])
    for choice, length in zip(choices, lengths, strict=True):
        found = choice["logprobs"]
        end = len(found["tokens"]) - generated
        own, top = found["token_logprobs"][length:end], found["top_logprobs"][length:end]
        greedy = all(value == max(of.values()) for value, of in zip(own, top, strict=True))
        answers.append((sum(own), greedy))
    return answers


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_prompt_logprobs_equal_transformers(server: LiveServer, max_tokens: int) -> None:
    asked = pairs()
    body = {
        "model": server.model,
        "prompt": [context + ending for context, ending in asked],
        "temperature": 0,
        "max_tokens": max_tokens,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    got = sums(answer, [len(context) for context, _ in asked], generated=max_tokens)
    for (total, greedy), (context, ending) in zip(got, asked, strict=True):
        wanted, is_greedy = expected(context, ending)
        assert total == pytest.approx(wanted, abs=1e-3)
        assert greedy == is_greedy
    assert got[-1][1]


def test_lm_eval_itself(server: LiveServer, tiny_model: Callable[..., Path]) -> None:
    models = pytest.importorskip("lm_eval.models.openai_completions")
    client = models.LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions",
        model=server.model,
        tokenizer=str(tiny_model("llama")),
        tokenizer_backend="huggingface",
        max_length=256,
        batch_size=4,
    )
    asked = [(context, ending) for context in CONTEXTS for ending in ENDINGS]
    got = client.loglikelihood([SimpleNamespace(args=pair) for pair in asked])
    tokenizer = AutoTokenizer.from_pretrained(tiny_model("llama"))
    for (total, greedy), pair in zip(got, asked, strict=True):
        wanted, is_greedy = expected(*(tokenizer.encode(text) for text in pair))
        assert total == pytest.approx(wanted, abs=1e-3)
        assert greedy == is_greedy
