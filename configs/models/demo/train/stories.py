# ruff: noqa: E501 - sentences are kept whole and word lists read better as text
"""Short stories from plots: each beat of a plot has several tellings, and the slots tie them together."""

import random
from collections.abc import Sequence

import lexicon as lx
from grammar import expand, pick

Slots = dict[str, str]

OPENINGS = (
    "{Once upon a time|Long ago|Many years ago|One day}, in a {small|quiet|faraway|green} [place], there "
    "lived a(n) [trait] [hero] named [name].",
    "[Name] was a(n) [trait] [hero] who lived {near|at the edge of} a {small|quiet|large} [place].",
    "There was once a(n) [trait] [hero] called [name]. [He] lived in a {little house|small hut|cosy home} "
    "near the [place].",
)
HABITS = (
    "Every morning, [he] {ate|made|shared} some [food] and {looked out of the window|greeted the neighbours}.",
    "[He] loved [food], {long walks|old songs|quiet evenings} and, most of all, [his] [colour] [object].",
    "Everyone knew [name], because [he] always carried a(n) [colour] [object].",
)
ENDINGS = (
    "From that day on, [name] and [friend] were {the best of friends|never apart|friends for life}.",
    "That night, [name] fell asleep with a smile, and [friend] {kept watch|slept beside [him]}.",
    "And whenever the [place] was quiet, [name] and [friend] told the story again.",
    "They shared some [food], and everyone in the [place] was happy.",
)
MORALS = (
    "{And so [name] learned|[Name] had learned} that {small steps can carry you far|a good friend is "
    "worth more than gold|it is brave to ask for help|patience is a kind of strength|kindness always "
    "comes back}.",
)

PLOTS: dict[str, Sequence[Sequence[str]]] = {
    "lost": (
        (
            "One [weather] morning, the [object] was gone. [Name] looked under the bed, behind the door "
            "and in the garden, but it was nowhere.",
            "But one [weather] day, [name] lost the [colour] [object]. [He] searched {high and low|every "
            "corner}, and [he] began to cry.",
        ),
        (
            'On the path, [he] met [friend], a(n) [trait2] [helper]. "{Why are you so sad|What is wrong}?" '
            'asked [friend]. "I have lost my [object]," said [name].',
            'A(n) [trait2] [helper] named [friend] heard [him]. "Do not worry," said [friend]. "We will look '
            'for the [object] together."',
        ),
        (
            "They followed {tiny footprints|a trail of crumbs|the sound of a bell} past the [place2], {over "
            "a wooden bridge|across a cold stream|through tall grass}, until the sun was low.",
            "Together they walked to the [place2]. They asked the {birds|trees|wind}, and they looked {under "
            "every stone|behind every wall}.",
        ),
        (
            "There, {in an old nest|under a bush|beside a well}, something was shining. It was the [colour] "
            "[object]! [Name] laughed and {danced|jumped} for joy.",
            'At last [friend] called out, "Look!" The [object] was lying {in the moss|on a flat rock|under '
            "a leaf}, safe and dry.",
        ),
    ),
    "storm": (
        (
            "One night, a great storm came to the [place]. The wind {howled|roared}, the rain fell, and every "
            "light went out.",
            "Then the sky turned dark. Thunder rolled over the [place], and the river began to rise.",
        ),
        (
            "[Name] heard a voice in the dark. It was [friend], a(n) [trait2] [helper], who was {stuck on a "
            "branch|lost in the rain|trapped behind a fallen tree}.",
            "Through the rain, [he] saw [friend] the [helper], cold and alone, calling for help.",
        ),
        (
            "[Name] was afraid, but [he] {lit a lamp|held a lantern high} and walked out into the wind. "
            '"Hold on!" [he] called. "I am coming!"',
            "[He] took a lamp, counted to three, and ran into the storm, one step at a time.",
        ),
        (
            "[He] pulled [friend] free, and they hurried home. There they sat by the fire and {drank hot "
            "tea|ate warm [food]} until the storm had passed.",
            "Slowly, [he] led [friend] back to the house. By morning the sky was blue again, and the [place] "
            "was {bright and clean|full of birds}.",
        ),
    ),
    "music": (
        (
            "More than anything, [name] wanted to play the [instrument]. But the first note sounded like a "
            "door that would not open.",
            "One day, [name] found an old [instrument] in the attic. [He] tried to play it, and the whole "
            "[place] covered its ears.",
        ),
        (
            '"I will never learn," [he] sighed. But [friend], a(n) [trait2] [helper], said, "Play one note '
            'today, and one more tomorrow."',
            '[Friend] the [helper] listened from the window. "Do not hurry," said [friend]. "Let each note '
            'lead to the next."',
        ),
        (
            "So [name] practised every day. In [season] [he] learned a slow song, and soon the notes "
            "flowed like water.",
            "Day after day, [he] practised, first slowly, then {smoothly|gently}. Little by little, the notes "
            "became a song.",
        ),
        (
            "When the festival came, [name] played under the lanterns. No note was late, no note was "
            "broken, and everyone {cheered|began to dance}.",
            "At the end of the year, [he] played for the whole [place]. The music was so smooth that "
            "even the wind stopped to listen.",
        ),
    ),
    "seed": (
        (
            'One [weather] day, a stranger gave [name] a tiny seed. "Take care of it," the stranger said, '
            '"and it will take care of you."',
            "In [season], [name] found a tiny seed on the road and planted it beside the [place].",
        ),
        (
            '[He] gave it water every morning, but nothing happened. "Maybe it is only a stone," [he] '
            "thought.",
            "Days passed, and then weeks. The ground stayed bare, and some of the neighbours laughed.",
        ),
        (
            'Only [friend], a(n) [trait2] [helper], believed in the seed. "Wait a little longer," said [friend]. '
            '"Good things grow slowly."',
            'Then a(n) [trait2] [helper] named [friend] came by. "Sing to it," said [friend], and so they sang '
            "together every evening.",
        ),
        (
            "One morning there was a green leaf, and then a tree, and then a tree full of [colour] fruit. "
            "There was enough for the whole [place].",
            "At last a small green leaf appeared. By [season2] it was a tall tree, and its [colour] flowers "
            "could be seen from the [place2].",
        ),
    ),
    "map": (
        (
            "One [weather] afternoon, [name] found an old map inside a {dusty book|wooden box|winter coat}. It showed a path to the "
            "[place2], and a small red cross.",
            '[Name] opened an old book, and a map fell out. In one corner someone had written: "Follow the '
            '[colour] stars."',
        ),
        (
            '[He] packed some [food] and asked [friend], a(n) [trait2] [helper], to come along. "I thought you '
            'would never ask," said [friend].',
            '"I cannot go alone," said [name]. So [friend] the [helper] packed a bag, and they left before '
            "sunrise.",
        ),
        (
            "They crossed a {deep river|dark wood|high hill}, and they slept under the stars. Once they lost "
            "the way, but [friend] remembered the map.",
            "The road was long. They walked past the [place2], climbed a steep hill, and helped an old "
            "traveller on the way.",
        ),
        (
            'At the red cross they dug until they found a box. Inside was no gold, only a note: "The '
            'treasure is the friend who came with you."',
            "Under a flat stone they found a box with a(n) [colour] [object] inside. It was not made of gold, but "
            "it was the most beautiful thing they had ever seen.",
        ),
    ),
    "race": (
        (
            "Every [season], there was a great race from the [place] to the [place2]. [Name] had never "
            "won, but [he] wanted to try again.",
            'One [weather] day, a sign appeared: "Great race tomorrow!" [Name] wrote down [his] name, although '
            "everyone said [he] was too slow.",
        ),
        (
            '[Friend], a(n) [trait2] [helper], was the fastest of all. "I will be done before lunch," laughed '
            "[friend], and ran off like the wind.",
            "At the start, [friend] the [helper] rushed ahead. [Name] did not hurry. [He] took one steady step "
            "after another.",
        ),
        (
            "But [friend] ran so fast that soon [he2] had to stop and rest. Stop and go, stop and go, all day "
            "long.",
            "Half way, [friend] {fell into the mud|took a wrong turn|sat down with a sore foot} and could not go "
            "on.",
        ),
        (
            '[Name] stopped to help. "Lean on me," [he] said. They crossed the line side by side, and the '
            "[place2] cheered for both of them.",
            "[Name] gave [friend] some [food] and a hand. They finished last, but they finished together, and "
            "they were given a(n) [colour] [object].",
        ),
    ),
    "machine": (
        (
            "In the middle of the [place] stood a strange old machine. Nobody knew what it was for, and it "
            "had been silent for years.",
            "One day the great clock of the [place] stopped, and nobody could agree on the time.",
        ),
        (
            "[Name] decided to mend it. [He] brought a lamp, some oil and a very long list of "
            "questions.",
            '"I will mend it," said [name], although [he] had never mended anything before.',
        ),
        (
            "It did not work. Then [friend], a(n) [trait2] [helper], looked inside and pointed at a tiny wheel. "
            '"It is waiting for that one," said [friend].',
            'A(n) [trait2] [helper] named [friend] held the lamp. "Look," said [friend], "one big wheel is making '
            'all the small wheels wait."',
        ),
        (
            "They let the big wheel turn a little at a time, and the whole machine began to hum. It played a "
            "soft song, and the song never stopped.",
            "They moved the wheel, and tick, tock, the machine came back to life. Everyone in the [place] came "
            "out to see it.",
        ),
    ),
    "star": (
        (
            "One clear night, a little star fell from the sky and landed near the [place]. [Name] {ran out to "
            "see it|found it in the grass}.",
            "One night, [name] saw a small light in the grass. It was a star, and it had lost its way.",
        ),
        (
            '"I want to go home," said the star. [Name] put it gently into a {basket|scarf|warm hat} and promised to '
            "help.",
            'The star was cold and frightened. "Do not be afraid," said [name]. "I will take you home."',
        ),
        (
            "[Friend], a(n) [trait2] [helper], knew the way to the highest hill. They walked past the [place2] "
            "all night, and the star lit the path.",
            "So [name] asked [friend], a(n) [trait2] [helper], and together they climbed the hill above the "
            "[place2].",
        ),
        (
            "At the top, [name] lifted the star as high as [he] could. It shone [colour], then gold, and "
            "flew back to its family.",
            "There the wind picked up the star and carried it into the sky. Now one star always shines "
            "over the [place].",
        ),
    ),
}


def story_slots(rng: random.Random, hero: str | None = None, place: str | None = None) -> Slots:
    """Choose who, where and with what, all different from one another."""
    hero = hero or rng.choice(lx.ANIMALS)
    girl = hero in ("queen", "princess", "witch", "girl", "hen", "cow") or (
        hero not in ("king", "boy", "wizard") and rng.random() < 0.5
    )
    helper = rng.choice([a for a in lx.ANIMALS[:60] if a != hero])
    place = place or rng.choice(lx.PLACES)
    trait, trait2 = rng.sample(lx.TRAITS, 2)
    season, season2 = rng.sample(lx.SEASONS, 2)
    name = lx.person(rng, "girl" if girl else "boy")
    friend_girl = rng.random() < 0.5
    friend = name
    while friend == name:
        friend = lx.person(rng, "girl" if friend_girl else "boy")
    return {
        "hero": hero, "helper": helper, "name": name, "friend": friend, "trait": trait,
        "trait2": trait2, "place": place, "season": season, "season2": season2,
        "place2": rng.choice([p for p in lx.PLACES if p != place]),
        "object": rng.choice(lx.OBJECTS), "colour": rng.choice(lx.COLOURS),
        "food": rng.choice(lx.FOODS), "weather": rng.choice(lx.WEATHERS),
        "instrument": rng.choice(lx.INSTRUMENTS),
        "he": "she" if girl else "he", "him": "her" if girl else "him",
        "his": "her" if girl else "his", "he2": "she" if friend_girl else "he",
    }  # fmt: skip


def tell(rng: random.Random, slots: Slots, plot: str | None = None) -> str:
    """One story of about 200 tokens, in paragraphs."""
    beats = PLOTS[plot or rng.choice(list(PLOTS))]
    first = pick(rng, OPENINGS, slots) + " " + pick(rng, HABITS, slots)
    middle = [pick(rng, beat, slots) for beat in beats]
    last = pick(rng, ENDINGS, slots)
    if rng.random() < 0.5:
        last += " " + pick(rng, MORALS, slots)
    return "\n\n".join((first, " ".join(middle[:2]), " ".join(middle[2:]), last))


def tell_long(rng: random.Random, slots: Slots) -> str:
    """A story in three chapters, each with its own plot and the same heroes: about 450 tokens."""
    plots = rng.sample(list(PLOTS), 3)
    parts = [pick(rng, OPENINGS, slots) + " " + pick(rng, HABITS, slots)]
    for number, plot in enumerate(plots, 1):
        beats = [pick(rng, beat, slots) for beat in PLOTS[plot]]
        parts.append(f"Chapter {number}\n\n" + " ".join(beats))
        slots = slots | {"object": rng.choice(lx.OBJECTS), "weather": rng.choice(lx.WEATHERS)}
    parts.append(pick(rng, ENDINGS, slots) + " " + pick(rng, MORALS, slots))
    return "\n\n".join(parts)


def summary(rng: random.Random, slots: Slots) -> str:
    return expand(
        rng,
        "{It is a story about|The story is about} [name], a(n) [trait] [hero], and [friend], a(n) [trait2] [helper]"
        ", who help each other near a(n) [place].",
        slots,
    )
