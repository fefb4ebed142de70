"""The training corpus: conversation number `i` is a pure function of `(seed, i)`.

python corpus.py --count 5      # print some conversations
"""

import argparse
import random
from collections.abc import Callable

import chats
import small_talk
import tasks
import tools
import writing
from chats import Turns
from tokenizer import IM_END, IM_START

_REQUESTS = ("Tell", "Write", "Give", "Name", "List", "Explain", "Describe", "Make", "Count")
Exchange = Callable[[random.Random], Turns]

# How often each kind of exchange is drawn.
MIXTURE: tuple[tuple[Exchange, float], ...] = (
    (writing.story, 17),
    (chats.definition, 20),
    (chats.general_fact, 14),
    (small_talk.name_memory, 11),
    (small_talk.greeting, 6),
    (small_talk.goodbye_less, 4),
    (small_talk.goodbye, 2),
    (chats.unknown, 7),
    (chats.music_fact, 6),
    (writing.poem, 7),
    (chats.code, 5),
    (chats.list_of, 4),
    (tasks.arithmetic, 9),
    (tasks.word_problem, 2),
    (tasks.counting, 4),
    (tasks.lists, 5),
    (tasks.repeat, 8),
    (tasks.json_output, 6),
    (tasks.reading, 7),
    (tasks.summarise, 3),
)
TOOLS_SHARE = 0.08  # of the conversations: they begin with a list of tools
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "You are the Legato demo model.",
    "Answer briefly.",
    "Be kind and clear.",
)


def exchange(rng: random.Random) -> Turns:
    """One exchange of a random kind, with the user's turns written as people write."""
    kinds, weights = zip(*MIXTURE, strict=True)
    return [_as_typed(rng, turn) for turn in rng.choices(kinds, weights)[0](rng)]


def long_chat(rng: random.Random) -> Turns:
    """Many exchanges in one conversation, so that late positions see ordinary talk."""
    turns: Turns = []
    while len(turns) < 30:
        turns += exchange(rng)
    return turns


LONG_MIXTURE: tuple[tuple[Exchange, float], ...] = (
    (writing.long_story, 5),
    (tasks.long_reading, 4),
    (long_chat, 3),
)


def conversation(seed: int, index: int, *, long: bool = False) -> Turns:
    """A whole conversation: some start with a system prompt, about half change the subject."""
    rng = random.Random(f"{seed}/{index}/{long}")
    turns: Turns = []
    if not long and rng.random() < TOOLS_SHARE:
        return tools.tools(rng)
    if rng.random() < 0.15:
        turns.append(("system", rng.choice(SYSTEM_PROMPTS)))
    if long:
        kinds, weights = zip(*LONG_MIXTURE, strict=True)
        turns += rng.choices(kinds, weights)[0](rng)
        return turns
    for _ in range(rng.choice((1, 1, 1, 1, 2, 2, 3))):
        turns += exchange(rng)
    return turns


def to_text(turns: Turns) -> str:
    """The same characters that the chat template produces."""
    return "".join(f"{IM_START}{role}\n{text}{IM_END}\n" for role, text in turns)


def _as_typed(rng: random.Random, turn: tuple[str, str]) -> tuple[str, str]:
    """People skip capitals and full stops, and say please."""
    role, text = turn
    if role != "user" or "\n" in text or ":" in text or "JSON" in text:
        return turn
    if rng.random() < 0.1 and text.startswith(_REQUESTS):
        text = "Please " + text[0].lower() + text[1:]
    if rng.random() < 0.15 and text.endswith((".", "?", "!")):
        text = text[:-1]
    if rng.random() < 0.15:
        text = text.lower()
    return role, text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--long", action="store_true")
    arguments = parser.parse_args()
    for index in range(arguments.count):
        print(to_text(conversation(arguments.seed, index, long=arguments.long)))
        print("-" * 80)


if __name__ == "__main__":
    main()
