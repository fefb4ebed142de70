"""Turn conversations and pieces of Python into fixed-length rows of token ids for training.

Rows hold whole documents, so nothing starts in the middle of a sentence. A parallel mask says
which tokens the loss counts: every token of Python and of an answer, and one in eight of what the
user wrote, because the model needs to answer well and need not predict what it is asked.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from chats import Turns
from corpus import conversation
from standard_library import shuffled_pieces
from tokenizers import Tokenizer

PROMPT_TOKEN_SHARE = 0.125
CHARACTERS_PER_TOKEN = 3  # of Python, a little below the mean
_OPEN_ROWS = 64  # rows still being filled; more means less padding


@dataclass(frozen=True, slots=True)
class Rows:
    """`tokens` uint16 [rows, length + 1]; `counted` bool, same shape: is this token a target?"""

    tokens: npt.NDArray[np.uint16]
    counted: npt.NDArray[np.bool_]


def encode(tokenizer: Tokenizer, turns: Turns, rng: random.Random) -> tuple[list[int], list[bool]]:
    """One conversation, closed by <|endoftext|>; the ids equal those of the chat template."""
    ids: list[int] = []
    counted: list[bool] = []
    for role, text in turns:
        head = tokenizer.encode(f"<|im_start|>{role}\n").ids
        body = tokenizer.encode(f"{text}<|im_end|>").ids
        tail = tokenizer.encode("\n").ids
        ids += head + body + tail
        counted += [False] * len(head)
        if role == "assistant":
            counted += [True] * len(body)
        else:
            counted += [rng.random() < PROMPT_TOKEN_SHARE for _ in body]
        counted += [False] * len(tail)
    return [*ids, 0], [*counted, False]


def chat_rows(
    tokenizer: Tokenizer, seed: int, length: int, num_rows: int, *, long: bool = False
) -> Rows:
    """Conversations `(seed, 0), (seed, 1), ...`."""
    return _packed(_conversations(tokenizer, seed, long=long), length, num_rows)


def python_rows(
    tokenizer: Tokenizer, seed: int, length: int, num_rows: int, *, held_out: bool = False
) -> Rows:
    """Pieces of the standard library; every token counts."""
    return _packed(_python(tokenizer, seed, length, held_out=held_out), length, num_rows)


def _packed(documents: Iterator[tuple[list[int], list[bool]]], length: int, num_rows: int) -> Rows:
    """Pack whole documents into `num_rows` rows, best fit first; leave out what is longer."""
    width = length + 1
    tokens = np.zeros((num_rows, width), dtype=np.uint16)
    counted = np.zeros((num_rows, width), dtype=np.bool_)
    open_rows: list[tuple[list[int], list[bool]]] = []
    done = 0
    for ids, mask in documents:
        if len(ids) > width:
            continue
        fitting = [row for row in open_rows if len(row[0]) + len(ids) <= width]
        if fitting:
            row = max(fitting, key=lambda r: len(r[0]))
            row[0].extend(ids)
            row[1].extend(mask)
        else:
            open_rows.append((ids, mask))
        if len(open_rows) > _OPEN_ROWS:
            fullest = max(range(len(open_rows)), key=lambda i: len(open_rows[i][0]))
            row_ids, row_mask = open_rows.pop(fullest)
            tokens[done, : len(row_ids)] = row_ids
            counted[done, : len(row_mask)] = row_mask
            done += 1
            if done == num_rows:
                break
    return Rows(tokens, counted)


def _conversations(
    tokenizer: Tokenizer, seed: int, *, long: bool
) -> Iterator[tuple[list[int], list[bool]]]:
    rng = random.Random(seed)
    index = 0
    while True:
        yield encode(tokenizer, conversation(seed, index, long=long), rng)
        index += 1


def _python(
    tokenizer: Tokenizer, seed: int, length: int, *, held_out: bool
) -> Iterator[tuple[list[int], list[bool]]]:
    for text in shuffled_pieces(seed, length * CHARACTERS_PER_TOKEN, held_out=held_out):
        ids = [*tokenizer.encode(text).ids, 0]
        yield ids, [True] * len(ids)
