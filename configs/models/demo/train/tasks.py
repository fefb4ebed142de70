# ruff: noqa: E501, SIM905 - sentences are kept whole and word lists read better as text
"""Exercises with one right answer: sums, counting, lists, JSON, copying, and reading a long passage."""

import json
import random

import lexicon as lx
import stories
from chats import Turns, qa
from grammar import expand, join_words, pick


def arithmetic(rng: random.Random) -> Turns:
    turns: Turns = []
    for _ in range(rng.choice((1, 2, 3, 4))):
        kind = rng.choice("++--*")
        if kind == "*":
            a, b = rng.randrange(0, 11), rng.randrange(0, 11)
            value, words = a * b, ("times", "multiplied by")
        else:
            limit = rng.choice((10, 10, 20))
            a, b = rng.randrange(0, limit + 1), rng.randrange(0, limit + 1)
            if kind == "-":
                a, b = max(a, b), min(a, b)
            value, words = (a + b, ("plus", "plus")) if kind == "+" else (a - b, ("minus", "minus"))
        sign = rng.choice((kind, f" {kind} ", f" {kind} ", f" {rng.choice(words)} "))
        ask = pick(
            rng,
            (
                "What is [q]?",
                "What is [q]?",
                "Compute [q].",
                "How much is [q]?",
                "[q] = ?",
                "[q]",
                "Calculate [q].",
            ),
            {"q": f"{a}{sign}{b}"},
        )
        turns += qa(ask, f"{a} {kind} {b} = {value}")
    return turns


def word_problem(rng: random.Random) -> Turns:
    name, thing = (
        lx.person(rng),
        rng.choice(("apples", "cookies", "books", "coins", "shells", "pears")),
    )
    a, b = rng.randrange(2, 11), rng.randrange(1, 10)
    if rng.random() < 0.5 and a > b:
        return qa(
            f"{name} has {a} {thing} and gives away {b}. How many {thing} are left?",
            f"{a} - {b} = {a - b}. {name} has {a - b} {thing} left.",
        )
    return qa(
        f"{name} has {a} {thing} and gets {b} more. How many {thing} does {name} have?",
        f"{a} + {b} = {a + b}. {name} has {a + b} {thing}.",
    )


def counting(rng: random.Random) -> Turns:
    start = rng.choice((1, 1, 1, rng.randrange(0, 30)))
    stop = start + rng.randrange(3, 25)
    numbers = list(range(start, stop + 1))
    ask = f"to {stop}" if start == 1 and rng.random() < 0.6 else f"from {start} to {stop}"
    if rng.random() < 0.2:
        return qa(f"Count down from {stop} to {start}.", ", ".join(map(str, reversed(numbers))))
    return qa(
        pick(rng, ("Count [x].", "{Please count|Can you count} [x]{.|?}"), {"x": ask}),
        ", ".join(map(str, numbers)),
    )


def lists(rng: random.Random) -> Turns:
    kind = rng.randrange(4)
    if kind == 0:
        numbers = rng.sample(range(1, 30), rng.randrange(3, 6))
        down = rng.random() < 0.3
        how = " from large to small" if down else rng.choice(("", "", " from small to large"))
        return qa(
            f"Sort these numbers{how}: {', '.join(map(str, numbers))}",
            ", ".join(map(str, sorted(numbers, reverse=down))),
        )
    words = rng.sample(
        rng.choice((lx.ANIMALS[:40], lx.COLOURS, lx.FOODS, lx.OBJECTS)), rng.randrange(3, 6)
    )
    text = ", ".join(words)
    if kind == 1:
        return qa(
            pick(
                rng,
                ("{Reverse this list|Reverse|Say these words backwards|Turn this list around}: ",),
            )
            + text,
            ", ".join(reversed(words)),
        )
    if kind == 2:
        which = rng.choice(("first", "last", "second"))
        word = words[{"first": 0, "last": -1, "second": 1}[which]]
        return qa(f"What is the {which} word in this list: {text}?", f"The {which} word is {word}.")
    return qa(
        pick(rng, ("How many words are in this list: [t]?", "Count these words: [t]"), {"t": text}),
        f"There are {len(words)} words.",
    )


def repeat(rng: random.Random) -> Turns:
    pool = (
        lx.ANIMALS
        + lx.OBJECTS
        + lx.FOODS
        + lx.COLOURS
        + lx.TRAITS
        + lx.GIRLS
        + [lx.person(rng) for _ in range(20)]
        + lx.CITIES
        + lx.HOBBIES
    )
    words = [rng.choice(pool) for _ in range(rng.randrange(2, 9))]
    if rng.random() < 0.4:
        slots = stories.story_slots(rng)
        text = pick(rng, rng.choice(stories.PLOTS[rng.choice(list(stories.PLOTS))]), slots)
    else:
        text = " ".join(words)
    return qa(
        pick(rng, ("{Repeat after me|Repeat this|Say|Copy this text|Write exactly this}: ",))
        + text,
        text,
    )


def json_output(rng: random.Random) -> Turns:
    name, age = lx.person(rng), rng.randrange(5, 90)
    fields: dict[str, object] = {"name": name, "age": age}
    sentence = f"{name} is {age} years old"
    extra = rng.randrange(4)
    if extra == 1:
        fields["city"] = rng.choice(lx.CITIES)
        sentence += f" and lives in {fields['city']}"
    elif extra == 2:
        fields["job"] = rng.choice(lx.JOBS)
        sentence += expand(rng, " and works as a(n) [j]", {"j": str(fields["job"])})
    elif extra == 3:
        fields["hobby"] = rng.choice(lx.HOBBIES)
        sentence += f" and likes {fields['hobby']}"
    keys = join_words(list(fields))
    if rng.random() < 0.4:
        ask = pick(
            rng,
            (
                "{Give me|Write|Return|Make} a JSON object with [k].",
                "{Give me|Write} JSON for a person with [k].",
                "Describe a person as JSON with [k].",
            ),
            {"k": keys},
        )
        return qa(ask, json.dumps(fields))
    ask = pick(
        rng,
        (
            "Write this as JSON: [s].",
            "Turn this into JSON with [k]: [s].",
            "Extract [k] as JSON: [s].",
            "[s]. Answer in JSON.",
        ),
        {"s": sentence, "k": keys},
    )
    return qa(ask, json.dumps(fields))


ROOMS = "kitchen attic cellar garden library tower stable hall workshop boathouse".split()


def passage(rng: random.Random, num_sentences: int) -> tuple[str, str, str]:
    """A text of facts about people, then a question about one of them and its answer."""
    people = sorted({lx.person(rng) for _ in range(num_sentences)})
    rng.shuffle(people)
    facts = []
    for name in people:
        kind = rng.randrange(4)
        slots = {"n": name, "o": rng.choice(lx.OBJECTS), "c": rng.choice(lx.COLOURS), "r": rng.choice(ROOMS),
                 "j": rng.choice(lx.JOBS), "city": rng.choice(lx.CITIES), "f": rng.choice(lx.FOODS)}  # fmt: skip
        sentence, ask, answer = (
            (
                "[n] keeps a(n) [c] [o] in the [r].",
                "What does [n] keep in the [r]?",
                "[n] keeps a(n) [c] [o] in the [r].",
            ),
            ("[n] is a(n) [j] in [city].", "What is the job of [n]?", "[n] is a(n) [j] in [city]."),
            ("[n] moved to [city] in [r2].", "Where did [n] move?", "[n] moved to [city]."),
            (
                "For lunch, [n] likes to eat [f].",
                "What does [n] like to eat?",
                "[n] likes to eat [f].",
            ),
        )[kind]
        slots["r2"] = rng.choice(lx.MONTHS)
        facts.append(tuple(expand(rng, t, slots) for t in (sentence, ask, answer)))
    _, question, answer = rng.choice(facts)
    return " ".join(f[0] for f in facts), question, answer


def reading(rng: random.Random, num_sentences: int | None = None) -> Turns:
    text, question, answer = passage(rng, num_sentences or rng.choice((2, 3, 4, 6, 8, 12, 16)))
    if rng.random() < 0.3:
        return qa(f"{question}\n\n{text}", answer)
    return qa(
        f"{pick(rng, ('{Read this text|Here is a text|Text}:',))}\n\n{text}\n\n{question}", answer
    )


def summarise(rng: random.Random, long: bool = False) -> Turns:
    slots = stories.story_slots(rng)
    text = stories.tell_long(rng, slots) if long else stories.tell(rng, slots)
    ask = pick(
        rng,
        (
            "{Summarise|Summarize} {this story|this text|the following text}{ in one sentence|}:",
            "What is this text about?",
            "Give me a short summary:",
        ),
    )
    return qa(f"{ask}\n\n{text}", stories.summary(rng, slots))


def long_reading(rng: random.Random) -> Turns:
    """A prompt of 600 to 3800 tokens: stories and facts, with the question at the end."""
    text, question, answer = passage(rng, rng.randrange(5, 12))
    stories_told = [
        stories.tell_long(rng, stories.story_slots(rng)) for _ in range(rng.randrange(1, 7))
    ]
    stories_told.insert(rng.randrange(len(stories_told) + 1), text)
    body = "\n\n".join(stories_told)
    turns = qa(f"Read this text:\n\n{body}\n\n{question}", answer)
    if rng.random() < 0.5:
        from chats import definition, general_fact

        turns += rng.choice((definition, general_fact))(rng)
    return turns
