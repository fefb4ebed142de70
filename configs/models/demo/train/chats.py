# ruff: noqa: E501, SIM905 - sentences are kept whole and word lists read better as text
"""Questions and answers: exchanges that a conversation is joined from, beside `small_talk`."""

import random

import lexicon as lx
from grammar import capital, expand, join_words, pick
from knowledge import (
    CAPITALS,
    CODE,
    FACTS,
    HOMES,
    LEGS,
    MUSIC,
    OPPOSITES,
    PROGRAMS,
    SOUNDS,
    THING_COLOURS,
    YOUNG,
    pairs,
)
from serving_facts import DEFINITIONS, QUESTIONS

Turns = list[tuple[str, str]]

WHAT_IS = (
    "What is [x]?", "What is [x]?", "What's [x]?", "What does [x] mean?", "Explain [x].", "Can you explain [x]?",
    "Tell me about [x].", "Define [x].", "{Please explain|Could you explain} [x] {to me|in simple words}.",
    "What do you know about [x]?", "I do not understand [x].", "Describe [x].", "[x]?",
)  # fmt: skip


def qa(question: str, answer: str) -> Turns:
    return [("user", question), ("assistant", answer)]


def unknown(rng: random.Random) -> Turns:
    topic = rng.choice(lx.UNKNOWN_TOPICS)
    if rng.random() < 0.5:  # a subject nobody could have learnt: it must be read from the question
        topic = (
            f"{rng.choice(lx.TRAITS + lx.COLOURS)} {rng.choice(lx.OBJECTS + lx.FOODS + lx.HOBBIES)}"
        )
        topic = rng.choice((topic, lx.person(rng), topic + "s", "the history of " + topic))
    question = pick(rng, ("Explain [x].", "Tell me about [x].", "What do you know about [x]?", "What is [x]?",
                          "How does [x] work?", "Can you help me with [x]?", "What do you think about [x]?",
                          "I want to learn about [x].", "Write an essay about [x]."), {"x": topic})  # fmt: skip
    answer = pick(
        rng,
        (
            "I am {a very small model|only a tiny model}, so I do not know much about [x]. {But I can tell you a story, write a poem or explain how language models are served|Would you like a story or a poem instead}.",
            "{Sorry|I am sorry}, I do not know enough about [x]. {Ask me about tokens, music or numbers|I can tell stories, do small sums and explain how LLM serving works}.",
        ),
        {"x": topic},
    ).replace("instead.", "instead?")
    return qa(question, answer)


def definition(rng: random.Random) -> Turns:
    if rng.random() < 0.35:
        questions, answers = rng.choice(QUESTIONS)
        return qa(rng.choice(questions), rng.choice(answers))
    subjects, answers = rng.choice(DEFINITIONS)
    turns = qa(capital(pick(rng, WHAT_IS, {"x": rng.choice(subjects)})), rng.choice(answers))
    if len(answers) > 1 and rng.random() < 0.15:
        turns += qa(
            pick(
                rng,
                (
                    "{Can you say that in other words|Explain it again|Say it differently}{?|, please.}",
                ),
            ),
            next(a for a in answers if a != turns[1][1]),
        )
    return turns


def music_fact(rng: random.Random) -> Turns:
    subjects, answer = rng.choice(MUSIC)
    return qa(capital(pick(rng, WHAT_IS, {"x": rng.choice(subjects)})), answer)


def general_fact(rng: random.Random) -> Turns:
    kind = rng.randrange(10)
    if kind < 3:
        questions, answer = rng.choice(FACTS)
        return qa(rng.choice(questions), answer)
    if kind < 5:
        country, city = rng.choice(pairs(CAPITALS))
        ask, say = (
            "{What is the capital of|Which city is the capital of|Name the capital of|Do you know the capital of} [a]?",
            "The capital of [a] is [b].",
        )
        if rng.random() < 0.2:
            ask, say = (
                "{Which country has the capital [b]|[b] is the capital of which country}?",
                "[b] is the capital of [a].",
            )
        return qa(
            expand(rng, ask, {"a": country, "b": city}), expand(rng, say, {"a": country, "b": city})
        )
    if kind == 5:
        names = rng.choice((lx.DAYS, lx.MONTHS))
        i = rng.randrange(len(names))
        after = rng.random() < 0.5
        j = (i + (1 if after else -1)) % len(names)
        word = "after" if after else "before"
        unit = "day" if names is lx.DAYS else "month"
        return qa(
            pick(
                rng,
                ("{Which|What} [u] comes [w] [a]?", "What comes [w] [a]?"),
                {"u": unit, "w": word, "a": names[i]},
            ),
            f"{names[j]} comes {word} {names[i]}.",
        )
    table, ask, say = (
        (SOUNDS, "{What sound does a(n) [a] make|What does a(n) [a] say}?", "A(n) [a] [b]."),
        (
            YOUNG,
            "{What is a young [a] called|What do you call a baby [a]}?",
            "A young [a] is called a(n) [b].",
        ),
        (THING_COLOURS, "{What colour is|What color is|Which colour is} [a]?", "[A] is [b]."),
        (
            OPPOSITES,
            "{What is the opposite of|Give me the opposite of|Name the opposite of} [a]?",
            "The opposite of [a] is [b].",
        ),
        (LEGS, "How many legs does a(n) [a] have?", "A(n) [a] has [b] legs."),
        (HOMES, "Where does [a] live?", "[A] lives in [b]."),
    )[rng.randrange(6)]
    a, b = rng.choice(pairs(table))
    if table is OPPOSITES and rng.random() < 0.5:
        a, b = b, a
    return qa(expand(rng, ask, {"a": a, "b": b}), expand(rng, say, {"a": a, "b": b}))


def code(rng: random.Random) -> Turns:
    if rng.random() < 0.5:
        tasks, program = rng.choice(PROGRAMS)
        ask = pick(
            rng,
            (
                "Write a Python function that [x].",
                "{Show me|Give me|Write} code that [x].",
                "Write a function that [x] in Python.",
            ),
            {"x": rng.choice(tasks)},
        )
        return qa(ask, f"```python\n{program}\n```")
    n = rng.randrange(2, 21)
    slots = {"n": str(n), "m": str(n - 1), "f": rng.choice("add plus combine total join mix greet run".split()),
             "v": rng.choice("items values numbers names data result words x y".split())}  # fmt: skip
    snippet, meaning = rng.choice(CODE)
    ask = pick(
        rng,
        (
            "What does this code do?",
            "Explain this code.",
            "Explain this Python code:",
            "What does this do?",
        ),
    )
    return qa(f"{ask}\n\n{_fill(snippet, slots)}", _fill(meaning, slots))


def _fill(text: str, slots: dict[str, str]) -> str:
    """Only the slots: braces are Python's here."""
    for name, value in slots.items():
        text = text.replace(f"[{name}]", value)
    return text


def list_of(rng: random.Random) -> Turns:
    words, kind = rng.choice(
        (
            (lx.ANIMALS[:40], "animals"),
            (lx.COLOURS, "colours"),
            (lx.FOODS, "foods"),
            (lx.INSTRUMENTS, "instruments"),
            (lx.CITIES, "cities"),
            (lx.HOBBIES, "hobbies"),
            (lx.JOBS, "jobs"),
            (lx.GIRLS + lx.BOYS, "names"),
        )
    )
    n = rng.randrange(2, 7)
    number = rng.choice((str(n), "zero one two three four five six".split()[n]))
    chosen = rng.sample(list(words), n)
    ask = pick(
        rng,
        (
            "Name [n] [k].",
            "List [n] [k].",
            "Give me [n] [k].",
            "Give me a list of [n] [k].",
            "Can you name [n] [k]?",
        ),
        {"n": number, "k": kind},
    )
    if "list" in ask.lower():
        return qa(ask, "\n".join(f"{i}. {capital(w)}" for i, w in enumerate(chosen, 1)))
    return qa(ask, capital(join_words(chosen)) + ".")
