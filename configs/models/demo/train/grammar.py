"""A template language small enough to read at a glance.

`{a|b|c}` picks one alternative (they nest), `[slot]` is replaced by a value, `[Slot]` by the value
with a capital letter, and `a(n)` becomes "a" or "an" once the next word is known. All randomness
comes from the `random.Random` handed in, so a seed fixes every text.
"""

import random
import re
from collections.abc import Mapping, Sequence

_CHOICE = re.compile(r"\{([^{}]*)\}")
_SLOT = re.compile(r"\[(\w+)\]")
_ARTICLE = re.compile(r"\b([Aa])\(n\) (\w+)")
_VOWEL_SOUND = re.compile(r"(?!unicorn)[aeiou]|honest|hour", re.IGNORECASE)


def expand(rng: random.Random, template: str, slots: Mapping[str, str] | None = None) -> str:
    """Resolve choices, then slots, then articles."""
    text = template
    while match := _CHOICE.search(text):
        choice = rng.choice(match.group(1).split("|"))
        text = text[: match.start()] + choice + text[match.end() :]
    if slots is not None:
        text = _SLOT.sub(lambda m: _fill(m.group(1), slots), text)
    return _ARTICLE.sub(lambda m: _article(m.group(1), m.group(2)), text)


def pick(
    rng: random.Random, templates: Sequence[str], slots: Mapping[str, str] | None = None
) -> str:
    """Expand one template of several."""
    return expand(rng, rng.choice(templates), slots)


def join_words(words: Sequence[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    if len(words) < 2:
        return "".join(words)
    return ", ".join(words[:-1]) + " and " + words[-1]


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _fill(name: str, slots: Mapping[str, str]) -> str:
    if name in slots:
        return slots[name]
    return capital(slots[name[0].lower() + name[1:]])


def _article(letter: str, word: str) -> str:
    return f"{letter}n {word}" if _VOWEL_SOUND.match(word) else f"{letter} {word}"
