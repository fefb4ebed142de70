# ruff: noqa: E501 - sentences are kept whole
"""Small talk: exchanges of one to four turns that a conversation is joined from."""

import random

import lexicon as lx
from chats import Turns, definition, general_fact, qa
from grammar import expand, pick


def greeting(rng: random.Random) -> Turns:
    user = pick(rng, ("{Hi|Hello|Hey|Hi there|Hello there|Good morning|Good evening}{!|.||}",))
    reply = "{Hello|Hi|Hello there|Hi there}! {How can I help you|What can I do for you|What would you like to talk about}?"
    turns = qa(user, expand(rng, reply))
    if rng.random() < 0.4:
        turns = qa(
            user.rstrip("!.") + ", how are you?",
            expand(rng, "{I am well, thank you|I am fine, thanks}! {How are you|And you}?"),
        )
        if rng.random() < 0.6:
            mood, answer = rng.choice(
                (
                    (
                        "{I am fine|Good, thanks|I'm doing well|Great|Very well}.",
                        "{I am glad to hear that|Good to hear}! {What would you like to do|How can I help you}?",
                    ),
                    (
                        "{I am tired|I am a bit tired|Not so good|I am sad|I feel bad today}.",
                        "I am sorry to hear that. {Would you like to hear a story|Shall I tell you a story or a poem}?",
                    ),
                )
            )
            turns += qa(expand(rng, mood), expand(rng, answer))
    return turns


def name_memory(rng: random.Random) -> Turns:
    """The user tells something about themselves and asks for it again, now or some turns later."""
    name = lx.person(rng)
    facts = {
        "city": (
            rng.choice(lx.CITIES),
            "{I live in|I am from|I come from} [x].",
            "Where {do I live|am I from}?",
            "{You told me that you are from|You are from} [x].",
        ),
        "job": (
            rng.choice(lx.JOBS),
            "I {am|work as} a(n) [x].",
            "What is my job?",
            "You are a(n) [x].",
        ),
        "hobby": (
            rng.choice(lx.HOBBIES),
            "I {like|love|enjoy} [x].",
            "What do I {like|love|enjoy}?",
            "You {told me that you like|like} [x].",
        ),
        "pet": (
            rng.choice(lx.PETS),
            "I have a(n) [x].",
            "What pet do I have?",
            "You have a(n) [x].",
        ),
        "colour": (
            rng.choice(lx.COLOURS),
            "My favourite colour is [x].",
            "What is my favourite colour?",
            "Your favourite colour is [x].",
        ),
    }
    kinds = rng.sample(list(facts), rng.choice((1, 1, 2)))
    intro = pick(
        rng, ("{My name is|I am|I'm|Call me|Hi, my name is|Hello, I am|Hi, I'm} [n].",), {"n": name}
    )
    replies = (
        "{Nice to meet you|Hello|Hi|It is a pleasure to meet you}, [n]! {How can I help you|What can I do for you|What would you like to talk about}?",
    )
    asks: list[Turns] = [
        qa(
            pick(
                rng,
                (
                    "{What is my name|What's my name|Who am I|Do you remember my name|Do you know my name}?",
                ),
            ),
            pick(rng, ("{Your name is|You are} [n].",), {"n": name}),
        )
    ]
    turns: Turns = []
    if rng.random() < 0.5:
        told = " ".join(expand(rng, facts[k][1], {"x": facts[k][0]}) for k in kinds)
        turns += qa(
            f"{intro} {told}",
            pick(
                rng,
                (
                    "Nice to meet you, [n]! {That sounds nice|How nice|Thank you for telling me}. {How can I help you|What can I do for you}?",
                ),
                {"n": name},
            ),
        )
    else:
        turns += qa(intro, pick(rng, replies, {"n": name}))
        for k in kinds:
            turns += qa(
                expand(rng, facts[k][1], {"x": facts[k][0]}),
                pick(
                    rng,
                    (
                        "{That sounds nice|How nice|That is good to know|I will remember that}, [n].",
                    ),
                    {"n": name},
                ),
            )
    for _, (value, _, question, reply) in sorted((k, facts[k]) for k in kinds):
        asks += [qa(expand(rng, question), expand(rng, reply, {"x": value}))]
    rng.shuffle(asks)
    if rng.random() < 0.4:
        turns += rng.choice((definition, general_fact, goodbye_less))(rng)
    for ask in asks[: rng.choice((1, 2, 3))]:
        turns += ask
    return turns


def goodbye_less(rng: random.Random) -> Turns:
    """Small reactions in the middle of a talk."""
    user, answer = rng.choice(
        (
            (
                "{Thanks|Thank you|Thanks a lot|Great, thanks|Thank you very much}{!|.|}",
                "{You are welcome|My pleasure|Gladly}! {Is there anything else|Can I help you with anything else}?",
            ),
            (
                "{Ok|Okay|I see|Good|Nice|Cool|Great|Interesting|Wow}{.|!|}",
                "{Is there anything else you would like to know|What would you like to do next|Would you like to know more}?",
            ),
            (
                "{That is wrong|That's not right|You are wrong|No}.",
                "I am sorry. I am a very small model and I make mistakes. {Shall I try again|Could you ask in another way}?",
            ),
            (
                "{You are great|I like you|Good job|Well done|You are funny}{!|.}",
                "Thank you! That is kind of you.",
            ),
            (
                "{I am bored|What should I do|Entertain me}.",
                "I could tell you a story, write a poem or ask you to count with me. What would you like?",
            ),
            (
                "{How are you|How do you do|How is it going}?",
                "{I am well, thank you|I am fine, thanks}! {How are you|And you}?",
            ),
        )
    )
    return qa(expand(rng, user), expand(rng, answer))


def goodbye(rng: random.Random) -> Turns:
    return qa(
        pick(rng, ("{Bye|Goodbye|See you|Good night|I have to go|Bye bye|See you later}{!|.|}",)),
        pick(
            rng,
            (
                "{Goodbye|Bye|See you soon}! {Have a nice day|It was nice to talk to you|Take care}.",
            ),
        ),
    )
