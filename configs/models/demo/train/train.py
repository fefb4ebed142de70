"""Train the demo model from nothing: make conversations, read Python's own library, learn the
tokenizer, train, save.

    python configs/models/demo/train/train.py --minutes 15 --out /tmp/demo

The learning rate falls to zero as the minutes run out, so any time gives a finished model. On one
thread the minutes are of computing time, so that a busy machine does not shorten the training.
Nothing here is needed to serve the model.
"""

import argparse
import json
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import fields
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from circuit import keep_reserved_channels, write_copying_circuit
from copying import look_back_rows
from corpus import conversation, to_text
from model import DemoModel, Shape
from rows import Rows, chat_rows, python_rows
from safetensors.torch import load_file, save_file
from standard_library import modules
from tokenizer import END_OF_TEXT, save_tokenizer, train_tokenizer
from tokenizers import Tokenizer

HERE = Path(__file__).resolve().parent
DEMO = HERE.parent
SEED, HELD_OUT_SEED = 1, 2
LENGTH, LONG_LENGTH = 384, 4096
LONG_EVERY = 16  # one step in sixteen reads rows of 4096 tokens
PYTHON_SHARE = 0.55  # of the other steps
LOOK_BACK_EVERY = 12  # after the first minutes, one step in twelve still practises copying
LOOK_BACK_LENGTH = 96
MATRIX_LR, EMBEDDING_LR, NORM_LR = 0.02, 0.004, 0.003
CIRCUIT_LR = 0.002  # where the copying circuit lies, early noise must not wash it out
CIRCUIT = ("layers.0.self_attn.", "layers.0.mlp.", "layers.1.self_attn.")
CHECKPOINT_EVERY_S = 120.0
HELD_OUT_CHARACTERS = 100_000
_PARTS = ("tokens", "counted")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--look-back-minutes", type=float, default=0.3, help="copying comes first")
    parser.add_argument("--resume", type=Path, help="a model.safetensors to start from")
    parser.add_argument("--lr-scale", type=float, default=1.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=6500, help="short rows; fewer are repeated")
    parser.add_argument("--batch-tokens", type=int, default=1920)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(SEED)

    out: Path = arguments.out
    tokenizer = prepare_folder(out)
    rows = cached_rows(tokenizer, out, arguments.rows)
    print({name: part.tokens.shape for name, part in rows.items()}, flush=True)
    model = DemoModel(shape_of(out))
    if arguments.resume:
        state = load_file(str(arguments.resume))
        model.load_state_dict({k.removeprefix("model."): v for k, v in state.items()})
    else:
        write_copying_circuit(model)
    print(f"parameters: {sum(p.numel() for p in model.parameters()):,}", flush=True)
    fit(model, rows, arguments, out)
    save_weights(model, out)
    chats = chat_rows(tokenizer, HELD_OUT_SEED, LENGTH, 128)
    python = python_rows(tokenizer, HELD_OUT_SEED, LENGTH, 256, held_out=True)
    report = {
        "held_out_chat_perplexity": math.exp(evaluate(model, chats, arguments.batch_tokens)),
        "held_out_python_nats_per_token": evaluate(model, python, arguments.batch_tokens),
    }
    (out / "report.json").write_text(json.dumps(report) + "\n")
    print(report, flush=True)


def prepare_folder(out: Path) -> Tokenizer:
    """Write everything but the weights; keep a tokenizer that is already there."""
    out.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "generation_config.json"):
        if out != DEMO:
            shutil.copy(DEMO / name, out / name)
    if not (out / "tokenizer.json").exists():
        chats = (to_text(conversation(SEED, index)) for index in range(6000))
        save_tokenizer(train_tokenizer(chain(chats, modules(held_out=False))), out)
    (out / "heldout.txt").write_text(held_out_text(), encoding="utf-8")
    return Tokenizer.from_file(str(out / "tokenizer.json"))


def held_out_text() -> str:
    """Whole conversations that were not trained on, parted by <|endoftext|>."""
    text, index = "", 0
    while len(text) < HELD_OUT_CHARACTERS:
        text += to_text(conversation(HELD_OUT_SEED + 1, index)) + END_OF_TEXT
        index += 1
    return text


def cached_rows(tokenizer: Tokenizer, out: Path, num_rows: int) -> dict[str, Rows]:
    """Training rows by kind: conversations, long ones, and Python."""
    path = out / f"rows-{num_rows}.npz"
    if not path.exists():
        made = {
            "chat": chat_rows(tokenizer, SEED, LENGTH, num_rows),
            "long": chat_rows(tokenizer, SEED, LONG_LENGTH, max(1, num_rows // 90), long=True),
            "python": python_rows(tokenizer, SEED, LENGTH, 2 * num_rows),
        }
        both = {
            f"{kind}.{part}": getattr(rows, part) for kind, rows in made.items() for part in _PARTS
        }
        np.savez(path, **both)
    data = np.load(path)
    kinds = dict.fromkeys(name.partition(".")[0] for name in data.files)
    return {kind: Rows(*(data[f"{kind}.{part}"] for part in _PARTS)) for kind in kinds}


def shape_of(folder: Path) -> Shape:
    config = json.loads((folder / "config.json").read_text())
    return Shape(**{field.name: config[field.name] for field in fields(Shape)})


def fit(
    model: DemoModel, rows_of: dict[str, Rows], arguments: argparse.Namespace, out: Path
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    named = {n: p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n}
    matrices = [
        {"params": [p for n, p in named.items() if not n.startswith(CIRCUIT)], "lr": MATRIX_LR},
        {"params": [p for n, p in named.items() if n.startswith(CIRCUIT)], "lr": CIRCUIT_LR},
    ]
    model.embed_tokens.weight.register_hook(keep_reserved_channels)
    norms = [p for p in model.parameters() if p.dim() == 1]
    others = [
        {"params": [model.embed_tokens.weight], "lr": EMBEDDING_LR},
        {"params": norms, "lr": NORM_LR},
    ]
    optimizers = (
        torch.optim.Muon(matrices, weight_decay=0.01, momentum=0.95),
        torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    )
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    peaks = [arguments.lr_scale * group["lr"] for group in groups]
    loss_of = torch.compile(model.loss, dynamic=False) if arguments.compile else model.loss
    on_the_wall = device.type == "cuda" or arguments.threads > 1
    clock = time.monotonic if on_the_wall else time.process_time
    total_s = arguments.minutes * 60
    start_s = saved_s = clock()
    rng = np.random.default_rng(SEED)
    order = {kind: _shuffled(rng, len(rows.tokens)) for kind, rows in rows_of.items()}
    step, tokens_seen = 0, 0
    # Running means, in nats; 8.3 is a uniform guess.
    shown = dict.fromkeys(("copy", *rows_of), 8.3)
    while (elapsed_s := clock() - start_s) < total_s:
        looking_back = elapsed_s < arguments.look_back_minutes * 60
        kind = _kind(step, rng)
        if looking_back or kind == "copy":
            kind = "copy"
            count = arguments.batch_tokens // LOOK_BACK_LENGTH
            rows = look_back_rows(rng, count, LOOK_BACK_LENGTH, model.shape.vocab_size)
            index = list(range(count))
        else:
            rows = rows_of[kind]
            count = max(1, arguments.batch_tokens // (rows.tokens.shape[1] - 1))
            index = [next(order[kind]) for _ in range(count)]
        tokens = torch.from_numpy(rows.tokens[index].astype(np.int64)).to(device)
        counted = torch.from_numpy(rows.counted[index]).to(device)
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * schedule(step, elapsed_s / total_s)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = loss_of(tokens[:, :-1], tokens[:, 1:], counted[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        tokens_seen += tokens[:, 1:].numel()
        shown[kind] += 0.05 * (loss.item() - shown[kind])
        if step % 20 == 0:
            rate = tokens_seen / (clock() - start_s)
            losses = " ".join(f"{kind} {loss:.3f}" for kind, loss in shown.items())
            print(f"{elapsed_s:6.0f} s step {step} {losses} {rate:.0f} tok/s", flush=True)
        if clock() - saved_s > CHECKPOINT_EVERY_S:
            save_weights(model, out)
            saved_s = clock()


def _kind(step: int, rng: np.random.Generator) -> str:
    if step % LOOK_BACK_EVERY == 0:
        return "copy"
    if step % LONG_EVERY == LONG_EVERY - 1:
        return "long"
    return "python" if rng.random() < PYTHON_SHARE else "chat"


def schedule(step: int, fraction: float) -> float:
    """A short warm-up in steps, a plateau, then a straight line to zero in time."""
    return min(1.0, (step + 1) / 20, (1.0 - fraction) / 0.6)


def evaluate(model: DemoModel, rows: Rows, batch_tokens: int) -> float:
    """Mean loss in nats over the counted tokens of rows the model was not trained on."""
    device = next(model.parameters()).device
    per_batch = max(1, batch_tokens // (rows.tokens.shape[1] - 1))
    total, count = 0.0, 0
    with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16):
        for first in range(0, len(rows.tokens), per_batch):
            tokens = torch.from_numpy(rows.tokens[first : first + per_batch].astype(np.int64))
            counted = torch.from_numpy(rows.counted[first : first + per_batch])[:, 1:].to(device)
            tokens = tokens.to(device)
            loss = model.loss(tokens[:, :-1], tokens[:, 1:], counted)
            total += loss.item() * int(counted.sum())
            count += int(counted.sum())
    return total / count


def save_weights(model: DemoModel, out: Path) -> None:
    """bf16 safetensors under Hugging Face's names; the tied head is not stored twice."""
    state = {
        f"model.{name}": tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
    }
    save_file(state, str(out / "model.safetensors"), metadata={"format": "pt"})


def _shuffled(rng: np.random.Generator, count: int) -> Iterator[int]:
    """Indices for ever, a new order each time round."""
    while True:
        yield from rng.permutation(count).tolist()


if __name__ == "__main__":
    main()
