"""Python itself as training text: the source and documentation strings of the standard library.

The text comes with every Python; nothing of it is copied into this repository. Pieces begin where
a person would begin to type: at a module, a class or a function.
"""

import hashlib
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings"}
_HELD_OUT_ONE_IN = 40
_BEGINS = re.compile(r"(?=^(?:@|def |class |async def |if __name__))", re.MULTILINE)
_INNER_BEGINS = re.compile(r"(?=^    (?:@|def |async def ))|(?<=\n\n)", re.MULTILINE)
_MEMBER = re.compile(r"    (?:@|def |async def )")


def modules(*, held_out: bool) -> Iterator[str]:
    """The text of every module, or of the one in forty that training never reads."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if _SKIPPED.intersection(name.split("/")):
            continue
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
        if (number % _HELD_OUT_ONE_IN == 0) is held_out:
            text = path.read_text(encoding="utf-8", errors="ignore").expandtabs()
            yield text.lstrip("\ufeff")


def pieces(text: str, most_characters: int) -> Iterator[str]:
    """A module cut at its classes and functions; long ones again at their methods and blank
    lines, methods standing at the margin as people type them."""
    joined = ""
    for part in _BEGINS.split(text):
        if part.lstrip().startswith("@") or not joined:
            joined += part
            continue
        yield from _short(joined, most_characters)
        joined = part
    yield from _short(joined, most_characters)


def shuffled_pieces(seed: int, most_characters: int, *, held_out: bool = False) -> Iterator[str]:
    """Every piece of the library in a seeded order, again and again."""
    every = [
        piece
        for text in modules(held_out=held_out)
        for piece in pieces(text, most_characters)
        if len(piece) <= 2 * most_characters  # longer ones are tables
    ]
    rng = random.Random(seed)
    while True:
        rng.shuffle(every)
        yield from every


def _short(text: str, most_characters: int) -> Iterator[str]:
    text = text.strip("\n")
    if len(text) <= most_characters:
        if len(text) > 20:
            yield text + "\n"
        return
    joined = ""
    for part in _INNER_BEGINS.split(text):
        if joined and len(joined) + len(part) > most_characters:
            yield _dedented(joined)
            joined = ""
        joined += part
    if joined:
        yield _dedented(joined)


def _dedented(text: str) -> str:
    text = text.strip("\n") + "\n"
    if _MEMBER.match(text):
        text = re.sub(r"^    ", "", text, flags=re.MULTILINE)
    return text
