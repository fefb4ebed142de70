"""`legato bench accuracy`: what narrower weights and caches cost a model, in perplexity.

Every variant reads the same held-out text in windows; each token is predicted from what precedes
it in its window. No Ray: the stage runs in this process.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import typer

from actors.scheduling.plan import RequestStart, Slice, StepPlan, StepResult
from actors.scheduling.request import SamplingParams
from actors.stage.runner import StageRunner
from actors.stage.spec import StageSpec
from app.bench.report import make_report, publish
from app.bench.terminal import Json, Out, output, progress, table
from app.paths import locate

_BLOCK_SIZE: Final = 16

# name -> what differs from the model as it is stored
VARIANTS: Final[dict[str, dict[str, str]]] = {
    "float32": {"dtype": "float32", "kv_dtype": "float32"},
    "bf16": {},
    "bf16, int8 KV": {"kv_dtype": "int8"},
    "int8": {"quantization": "int8"},
    "int8, int8 KV": {"quantization": "int8", "kv_dtype": "int8"},
    "int4": {"quantization": "int4"},
    "w8a8": {"quantization": "w8a8"},
    "w4a8": {"quantization": "w4a8"},
}


@dataclass(frozen=True, slots=True)
class Accuracy:
    """rms_logprob_error: of the log-probabilities of the text's tokens, against bf16's."""

    variant: str
    perplexity: float
    rms_logprob_error: float


def windows_of(model: Path, text: str, num_tokens: int, count: int) -> list[tuple[int, ...]]:
    """The text's first `count` windows of `num_tokens` tokens."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids
    starts = range(0, len(ids) - num_tokens + 1, num_tokens)
    return [tuple(ids[start : start + num_tokens]) for start in starts[:count]]


def logprobs(model: Path, windows: list[tuple[int, ...]], **change: str) -> np.ndarray:
    """Log-probability (natural) of every token but each window's first, in order."""
    length = max(map(len, windows))
    runner = StageRunner(
        StageSpec(
            str(model),
            backend="cpu",
            block_size=_BLOCK_SIZE,
            max_requests=2,
            max_step_tokens=length,
            **change,  # type: ignore[arg-type]
        )
    )
    runner.allocate(-(-(length + 1) // _BLOCK_SIZE) + 1)
    try:
        return np.concatenate(
            [np.array(list(_window(runner, n, w))) for n, w in enumerate(windows)]
        )
    finally:
        runner.close()


def _window(runner: StageRunner, number: int, tokens: tuple[int, ...]) -> Iterator[float]:
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
    blocks = tuple(range(-(-(len(tokens) + 1) // _BLOCK_SIZE)))
    plan = StepPlan(
        number,
        (Slice(number, 0, len(tokens), True),),
        started=(RequestStart(number, tokens, len(tokens), blocks, sampling),),
        released=(number - 1,) if number else (),
    )
    result = runner.execute(plan, None)
    assert isinstance(result, StepResult)
    for _, _, entries in result.prompt_logprobs:
        for entry in entries:
            yield entry.logprob


def command(
    context: typer.Context,
    model: Annotated[Path, typer.Option(callback=locate, help="A model folder.")] = Path(
        "configs/models/demo"
    ),
    text: Annotated[Path | None, typer.Option(help="Default: the folder's heldout.txt.")] = None,
    window: Annotated[int, typer.Option(min=2, help="Tokens per window.")] = 256,
    windows: Annotated[int, typer.Option(min=1, help="How many windows to read.")] = 64,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Perplexity on held-out text by weight and KV format, and the error against bf16."""
    model = locate(model)
    source = text or model / "heldout.txt"
    if not source.exists():
        raise typer.BadParameter(f"no file {source}", param_hint="--text")
    parts = windows_of(model, source.read_text(), window, windows)
    if not parts:
        raise typer.BadParameter(f"{source} has fewer than {window} tokens", param_hint="--window")
    logprobs_of = {
        name: logprobs(model, parts, **change)
        for name, change in progress(list(VARIANTS.items()), "reading")
    }
    plain = logprobs_of["bf16"]
    results = [
        Accuracy(name, math.exp(-values.mean()), float(np.sqrt(np.mean((values - plain) ** 2))))
        for name, values in logprobs_of.items()
    ]
    settings = json.loads((model / "config.json").read_text())
    found = {
        "vocab_size": settings["vocab_size"],
        "num_tokens": int(plain.size),
        "results": [asdict(r) for r in results],
    }
    publish(make_report(context, found, {"text": source}), as_json, out)
    if not as_json:
        columns = ("weights and KV", "perplexity", "RMS error of log-probabilities against bf16")
        rows = [(r.variant, f"{r.perplexity:.3f}", f"{r.rms_logprob_error:.4f}") for r in results]
        output.print(table(f"{plain.size} held-out tokens", columns, rows))
