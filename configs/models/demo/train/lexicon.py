# ruff: noqa: E501, SIM905 - sentences are kept whole and word lists read better as text
"""The words the templates draw from. Every list is ours, written for this corpus."""

import random

GIRLS = """Ada Mina Lila Nora Clara Ruby Ivy Elsa Tessa Wren Maya Zoe Hana Iris Juno Kira Lucy Olive
Pearl Rosa Sofia Vera Anna Emma Grace Lena Mia Priya Sara Yuki Fatima Ingrid Chloe Amara""".split()
BOYS = """Theo Oscar Finn Leo Max Hugo Jasper Milo Otis Pip Ravi Sam Toby Felix Arlo Bruno Dario Emil
Gus Ivan Kofi Noah Omar Tom Viktor Ben Carlos David James John Kenji Liam Marco Peter Ali""".split()


def person(rng: random.Random, kind: str | None = None) -> str:
    """A first name; each is one token, so that copying it is one step of the attention."""
    kind = kind or rng.choice(("girl", "boy"))
    return rng.choice(GIRLS if kind == "girl" else BOYS)


# Heroes: the animals and people a story or poem may be about.
ANIMALS = """fox owl bear rabbit hedgehog mouse cat dog wolf otter badger squirrel turtle frog duck
goose swan robin sparrow crow penguin seal whale dolphin crab lion tiger elephant monkey panda koala
giraffe zebra horse pony donkey goat sheep cow pig chicken hen deer moose beaver bat bee ant spider
snail butterfly dragonfly octopus fish parrot dragon unicorn robot ghost giant wizard witch pirate
knight princess king queen sailor painter baker gardener farmer teacher doctor musician fisherman
clockmaker librarian astronaut detective child boy girl""".split()

PLACES = """forest village mountain island valley garden desert castle harbour city lighthouse farm
meadow river lake beach library bakery market school tower cave bridge theatre station
windmill orchard swamp museum kingdom""".split()

OBJECTS = """key lantern drum violin flute map book clock compass kite bell ring cup boat hat scarf
mirror box coin letter feather stone umbrella basket trumpet piano guitar ball crown telescope
teapot blanket candle shell whistle""".split()

FOODS = """bread soup cake honey apples berries cheese pancakes porridge noodles rice cookies pears
plums tea pie jam nuts carrots""".split()

COLOURS = (
    """red blue green yellow orange purple pink brown black white grey silver golden""".split()
)

TRAITS = """brave kind clever shy curious gentle patient cheerful quiet careful honest lonely proud
stubborn hopeful playful sleepy tiny young old""".split()

WEATHERS = """sunny rainy windy foggy snowy cloudy stormy warm cold bright""".split()
SEASONS = """spring summer autumn winter""".split()
DAYS = """Monday Tuesday Wednesday Thursday Friday Saturday Sunday""".split()
MONTHS = """January February March April May June July August September October November
December""".split()

INSTRUMENTS = """violin piano flute drum guitar trumpet cello harp clarinet""".split()
HOBBIES = """reading painting cooking running swimming hiking gardening singing dancing fishing
cycling knitting chess football tennis photography drawing music baking climbing""".split()
JOBS = """teacher nurse doctor farmer baker painter engineer student cook driver writer gardener
carpenter musician pilot plumber lawyer designer programmer scientist""".split()
PETS = """cat dog rabbit hamster parrot goldfish turtle pony""".split()
CITIES = """Paris London Berlin Rome Madrid Tokyo Oslo Vienna Lisbon Dublin Athens Cairo Delhi Lima
Boston Chicago Sydney Toronto Prague Warsaw Helsinki Seoul Nairobi Zurich Hamburg Munich""".split()

# Subjects this model was not taught, so that it learns to say so and to name what was asked.
UNKNOWN_TOPICS = """quantum physics; the stock market; black holes; the French Revolution; car engines;
philosophy; ancient Rome; modern art; chemistry; economics; politics; the human brain; volcanoes;
dinosaurs; tax law; cricket; opera; medicine; DNA; satellites; rocket fuel; mortgages; poetry theory;
the Middle Ages; blockchain; climate change; vaccines; algebra; geology; the Olympics; fashion;
video games; the news; movies; basketball; sushi; nuclear power; Shakespeare; Einstein; Mozart;
Linux; Rust; Java; databases; cameras; airplanes; bicycles; coffee; wine; sailing; yoga; Mars;
crystals; insurance; the universe; my homework; relativity; Napoleon; the Vikings; elections;
kubernetes; compilers; cryptography; operating systems; statistics; gravity; evolution; jazz history;
the meaning of life; robots; football scores; the weather today; space travel; marketing""".replace(
    "\n", " "
).split("; ")
