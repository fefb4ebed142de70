"""Names of the files of one GGUF model, which llama-gguf-split may have cut into parts."""

from __future__ import annotations

import re
from pathlib import PurePath

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def part_name(first: str, number: int, count: int) -> str:
    """The file of a part, counted from one, beside the first, whatever that one is called.

    >>> part_name("sub/big-00001-of-00003.gguf", 2, 3), part_name("model.gguf", 2, 3)
    ('sub/big-00002-of-00003.gguf', 'model-00002-of-00003.gguf')
    """
    match = _PART.fullmatch(first)
    if match is None and number == 1:
        return first
    stem = match["stem"] if match else first.removesuffix(".gguf")
    return f"{stem}-{number:05}-of-{count:05}.gguf"


def part_names(first: str) -> list[str]:
    """The files of all parts, by the name of the first; itself alone where it names no parts.

    >>> part_names("big-00001-of-00002.gguf"), part_names("big.gguf")
    (['big-00001-of-00002.gguf', 'big-00002-of-00002.gguf'], ['big.gguf'])
    """
    match = _PART.fullmatch(first)
    count = int(match["count"]) if match else 1
    return [part_name(first, number, count) for number in range(1, count + 1)]


def first_part(name: str) -> str:
    """The file that stands for all parts.

    >>> first_part("big-00002-of-00003.gguf"), first_part("big.gguf")
    ('big-00001-of-00003.gguf', 'big.gguf')
    """
    match = _PART.fullmatch(name)
    return f"{match['stem']}-00001-of-{match['count']}.gguf" if match else name


def model_stem(name: str) -> str:
    """The file's name without its ending and its number.

    >>> model_stem("sub/big-00001-of-00003.gguf"), model_stem("big.gguf")
    ('big', 'big')
    """
    match = _PART.fullmatch(name)
    return PurePath(match["stem"]).name if match else PurePath(name).stem
