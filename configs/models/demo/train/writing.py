# ruff: noqa: E501 - sentences are kept whole and word lists read better as text
"""Stories and poems on request, and questions about the story just told."""

import random

import lexicon as lx
import stories
from chats import Turns, qa
from grammar import capital, expand, pick

STORY_ASKS = (
    "Tell me a story.", "Tell me a story about a(n) [hero].", "Write a {short |}story about a(n) [hero].",
    "Write a story about a(n) [trait] [hero].", "Tell me a story about a(n) [hero] {in|and} a [place].",
    "{Can you tell me|I would like|I want|Give me} a story about a(n) [hero]{, please|}.", "A story about a(n) [hero], please.",
    "Write a story about a(n) [hero] named [name].", "Tell me a story about [name] the [hero].",
    "Tell me a story that takes place in a [place].", "Tell me a bedtime story.", "Make up a story about a(n) [hero] and a(n) [helper].",
)  # fmt: skip


def story(rng: random.Random) -> Turns:
    slots = stories.story_slots(rng)
    text = stories.tell(rng, slots)
    turns = qa(pick(rng, STORY_ASKS, slots), text)
    follow = rng.random()
    if follow < 0.12:
        turns += qa(pick(rng, ("{What was the name of the|What is the name of the|What was the|Who was the} [hero]{'s name|}?",), slots).replace("name of the " + slots["hero"] + "'s name", "name of the " + slots["hero"]),
                    pick(rng, ("The [hero]'s name was [name].",), slots))  # fmt: skip
    elif follow < 0.24:
        turns += qa(pick(rng, ("{Who helped [name]|Who was [name]'s friend|Who is [friend]}?",), slots),
                    pick(rng, ("[Friend], a(n) [trait2] [helper].",), slots))  # fmt: skip
    elif follow < 0.36:
        turns += qa(
            pick(rng, ("{Where did [name] live|Where does [name] live}?",), slots),
            pick(rng, ("[Name] lived near the [place].",), slots),
        )
    elif follow < 0.48:
        turns += qa(
            pick(
                rng,
                (
                    "{Summarise the story|Summarize the story|What was the story about|Make it shorter|What is it about}.",
                ),
            ),
            stories.summary(rng, slots),
        )
    elif follow < 0.55:
        turns += qa(
            pick(
                rng, ("{Another one|Tell me another story|One more|Another story}{, please|!|.}",)
            ),
            stories.tell(rng, stories.story_slots(rng)),
        )
    return turns


def long_story(rng: random.Random) -> Turns:
    slots = stories.story_slots(rng)
    ask = pick(
        rng,
        (
            "{Tell me|Write} a long story about a(n) [hero].",
            "Write a story with three chapters about a(n) [hero].",
            "Tell me a long story{ about [name] the [hero]|}.",
        ),
        slots,
    )
    return qa(ask, stories.tell_long(rng, slots))


RHYMES = (
    ("night", "light"), ("day", "way"), ("sea", "free"), ("rain", "again"), ("sky", "by"), ("tree", "me"),
    ("song", "along"), ("moon", "soon"), ("blue", "you"), ("snow", "go"), ("star", "far"), ("air", "there"),
)  # fmt: skip
LINES = {
    "night": "{The [x] is awake in the silent night|All around the [x] there is quiet night}",
    "light": "{And over the hills there is golden light|It walks to the window and looks for light}",
    "day": "{The [x] wakes up at the break of day|There goes the [x] on a [weather] day}",
    "way": "{With a song in its heart it will find the way|And [colour] leaves are along the way}",
    "sea": "{The [x] looks out at the silver sea|A [trait] [x] is beside the sea}",
    "free": "{And dreams of a life that is wide and free|The waves are singing, the wind is free}",
    "rain": "{The [x] is dancing in [season] rain|Listen, the [x] is out in the rain}",
    "again": "{It hums a small tune and it starts again|The clouds will go and the sun shines again}",
    "sky": "{The [x] lies down and it looks at the sky|A [colour] cloud is high in the sky}",
    "by": "{It waves at the birds that are passing by|And slowly the hours are drifting by}",
    "tree": "{The [x] is resting beneath the tree|The [x] has a friend in the old green tree}",
    "me": "{It whispers a secret to you and me|And nobody sees it but you and me}",
    "song": "{The [x] has a [trait] and quiet song|The wind and the [x] have an evening song}",
    "along": "{And all of the meadow will sing along|Come, take my hand, and we walk along}",
    "moon": "{The [x] is watching the rising moon|Soft on the [x] shines the [colour] moon}",
    "soon": "{The stars are all saying: good night, and soon|The winter is long, but the spring comes soon}",
    "blue": "{The [x] is dreaming in [colour] and blue|Above the [x] is a field of blue}",
    "you": "{And every dream has a place for you|The world is wide, and it waits for you}",
    "snow": "{The [x] leaves a track in the fresh white snow|The [x] is asleep in the falling snow}",
    "go": "{It does not know where the rivers go|And one by one all the worries go}",
    "star": "{The [x] is counting the evening star|The [x] makes a wish on a [colour] star}",
    "far": "{The road is winding, the road is far|And home is near, though it once was far}",
    "air": "{The [x] can smell it in [season] air|There is a [trait] [x] in the morning air}",
    "there": "{And someone who loves it is waiting there|Look at the garden, it still is there}",
}


def poem_text(rng: random.Random, subject: str) -> str:
    verses = []
    rhymes = rng.sample(RHYMES, rng.choice((2, 4, 4)))
    for first, second in zip(rhymes[::2], rhymes[1::2], strict=True):
        slots = {"x": subject, "colour": rng.choice(lx.COLOURS), "season": rng.choice(lx.SEASONS),
                 "weather": rng.choice(lx.WEATHERS), "trait": rng.choice(lx.TRAITS)}  # fmt: skip
        lines = [
            capital(
                expand(rng, LINES[w].replace("A [", "A(n) [").replace(" a [", " a(n) ["), slots)
            )
            for w in (*first, *second)
        ]
        verses.append(",\n".join(lines[:2]) + ".\n" + ",\n".join(lines[2:]) + ".")
    return "\n\n".join(verses)


def poem(rng: random.Random) -> Turns:
    subject = rng.choice(lx.ANIMALS + lx.PLACES + lx.OBJECTS)
    ask = pick(
        rng,
        (
            "Write a {short |}poem about a(n) [x].",
            "{Tell me|Give me|I would like} a poem about the [x].",
            "Write a poem.",
            "Make a rhyme about a(n) [x].",
            "Can you write a poem about a(n) [x]?",
        ),
        {"x": subject},
    )
    return qa(ask, poem_text(rng, subject))
