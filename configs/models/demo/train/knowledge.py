# ruff: noqa: E501 - sentences are kept whole and word lists read better as text
"""Music terms, simple facts about the world, and a few lines of explained code."""

CAPITALS = """France:Paris, Germany:Berlin, Italy:Rome, Spain:Madrid, Japan:Tokyo, Norway:Oslo,
Austria:Vienna, Portugal:Lisbon, Ireland:Dublin, Greece:Athens, Egypt:Cairo, India:New Delhi,
Peru:Lima, Canada:Ottawa, Australia:Canberra, Poland:Warsaw, Finland:Helsinki, Sweden:Stockholm,
Denmark:Copenhagen, Hungary:Budapest, Russia:Moscow, China:Beijing, Turkey:Ankara, Kenya:Nairobi,
Brazil:Brasilia, Mexico:Mexico City, England:London, Switzerland:Bern, Belgium:Brussels,
the Netherlands:Amsterdam, South Korea:Seoul, Thailand:Bangkok, Cuba:Havana, Argentina:Buenos Aires,
the United States:Washington"""

SOUNDS = """dog:barks, cat:meows, cow:moos, duck:quacks, sheep:bleats, horse:neighs, pig:oinks, owl:hoots,
lion:roars, wolf:howls, bee:buzzes, frog:croaks, mouse:squeaks"""
YOUNG = """dog:puppy, cat:kitten, cow:calf, horse:foal, sheep:lamb, duck:duckling, bear:cub, lion:cub,
goat:kid, frog:tadpole, swan:cygnet, deer:fawn, chicken:chick"""
THING_COLOURS = """the sky:blue, grass:green, snow:white, a banana:yellow, a strawberry:red, coal:black,
a lemon:yellow, an orange:orange, blood:red, the sun:yellow, chocolate:brown, milk:white, a carrot:orange,
a frog:green, an elephant:grey, a tomato:red"""
OPPOSITES = """hot:cold, big:small, fast:slow, happy:sad, light:dark, day:night, up:down, open:closed,
early:late, new:old, high:low, loud:quiet, full:empty, soft:hard, wet:dry, long:short, rich:poor, left:right,
near:far, strong:weak, good:bad, thick:thin, sweet:sour, young:old"""
LEGS = """dog:four, cat:four, spider:eight, ant:six, bee:six, bird:two, human:two, octopus:eight arms and no,
snake:no, horse:four, butterfly:six, chicken:two, frog:four"""
HOMES = """a bee:a hive, a bird:a nest, a fish:the water, a bear:a den or a cave, a rabbit:a burrow, a spider:a web,
a horse:a stable, a cow:a barn, a lion:the grassland, a penguin:the cold south, a camel:the desert, a whale:the sea"""


def pairs(table: str) -> list[tuple[str, str]]:
    """Read 'a:b, c:d' tables."""
    items = (item.strip().split(":") for item in table.replace("\n", " ").split(","))
    return [(left.strip(), right.strip()) for left, right in items]


FACTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("How many days are in a week?", "How many days does a week have?"), "A week has seven days."),
    (
        ("How many months are in a year?", "How many months does a year have?"),
        "A year has twelve months.",
    ),
    (("How many days are in a year?",), "A year has 365 days, and a leap year has 366."),
    (("How many hours are in a day?", "How many hours does a day have?"), "A day has 24 hours."),
    (("How many minutes are in an hour?",), "An hour has 60 minutes."),
    (("How many seconds are in a minute?",), "A minute has 60 seconds."),
    (
        ("Name the seasons.", "What are the four seasons?", "List the seasons."),
        "The four seasons are spring, summer, autumn and winter.",
    ),
    (
        (
            "Name the days of the week.",
            "List the days of the week.",
            "What are the days of the week?",
        ),
        "The days of the week are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday.",
    ),
    (
        ("List the months of the year.", "Name the months.", "What are the months of the year?"),
        "The months are January, February, March, April, May, June, July, August, September, October, November and "
        "December.",
    ),
    (
        ("What are the primary colours?", "Name the primary colors."),
        "The primary colours are red, yellow and blue.",
    ),
    (
        ("What are the colours of the rainbow?", "List the colors of the rainbow."),
        "The colours of the rainbow are red, orange, yellow, green, blue, indigo and violet.",
    ),
    (
        ("What is the largest animal?", "Which animal is the biggest?"),
        "The blue whale is the largest animal.",
    ),
    (
        ("What is the tallest animal?", "Which animal is the tallest?"),
        "The giraffe is the tallest animal.",
    ),
    (
        ("What is the fastest animal on land?", "Which animal runs fastest?"),
        "The cheetah is the fastest animal on land.",
    ),
    (
        ("What is the highest mountain?", "Which mountain is the tallest?"),
        "Mount Everest is the highest mountain on Earth.",
    ),
    (
        ("What is the largest ocean?", "Which ocean is the biggest?"),
        "The Pacific Ocean is the largest ocean.",
    ),
    (("What planet do we live on?", "Which planet is our home?"), "We live on the planet Earth."),
    (
        ("How many planets are there?", "How many planets are in the solar system?"),
        "There are eight planets in the solar system.",
    ),
    (
        ("Name the planets.", "List the planets."),
        "The planets are Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus and Neptune.",
    ),
    (
        ("What does the moon do?", "What is the moon?"),
        "The moon moves around the Earth about once a month.",
    ),
    (
        ("What is the sun?", "Is the sun a star?"),
        "The sun is a star. It gives the Earth light and warmth.",
    ),
    (
        ("Why is the sky blue?",),
        "The air scatters blue light more than red light, so blue light reaches us from every side of the sky.",
    ),
    (
        ("Why does it rain?", "Where does rain come from?"),
        "Water rises into the air, cools down and forms clouds. When the drops are heavy enough, they fall as rain.",
    ),
    (("What is ice?", "What is snow made of?"), "It is frozen water."),
    (
        ("At what temperature does water freeze?", "When does water freeze?"),
        "Water freezes at 0 degrees Celsius.",
    ),
    (
        ("At what temperature does water boil?", "When does water boil?"),
        "Water boils at 100 degrees Celsius.",
    ),
    (("How many letters are in the alphabet?",), "The English alphabet has 26 letters."),
    (
        ("Say the alphabet.", "Recite the alphabet.", "List the letters of the alphabet."),
        "A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, P, Q, R, S, T, U, V, W, X, Y, Z.",
    ),
    (
        ("How many continents are there?", "Name the continents."),
        "There are seven continents: Africa, Antarctica, Asia, Australia, Europe, North America and South America.",
    ),
    (
        ("What do plants need?", "What does a plant need to grow?"),
        "Plants need light, water, air and soil.",
    ),
    (("What do bees make?",), "Bees make honey."),
    (("What do cows give us?", "Where does milk come from?"), "Cows give us milk."),
    (
        ("What is Python?", "Tell me about Python."),
        "Python is a programming language that is easy to read. Legato is written in Python.",
    ),
    (
        ("What is HTTP?",),
        "HTTP is the protocol that browsers and servers use to talk to each other.",
    ),
    (("What is JSON?",), "JSON is a simple text format for data, made of keys and values."),
    (
        ("What is a computer?",),
        "A computer is a machine that follows instructions to work with data.",
    ),
    (
        ("What is a queue?",),
        "A queue is a line in which the first to come is the first to be served.",
    ),
    (
        ("Tell me a joke.", "Do you know a joke?", "Make me laugh.", "Say something funny."),
        "Why did the token cross the road? Because the scheduler had room in its budget.",
    ),
    (
        ("Give me a fun fact.", "Tell me something interesting.", "Tell me a fun fact."),
        "An octopus has three hearts, and two of them rest when it swims.",
    ),
    (
        ("How do I make tea?", "Tell me how to make tea."),
        "1. Boil some water.\n2. Put a tea bag into a cup.\n3. Pour the water over it.\n4. Wait three minutes and take "
        "the bag out.",
    ),
    (
        ("How do I make pancakes?", "Give me a recipe for pancakes."),
        "1. Mix flour, milk, two eggs and a little salt.\n2. Heat some butter in a pan.\n3. Pour in a thin layer.\n4. "
        "Turn it when it is golden, and serve it with honey.",
    ),
    (
        (
            "How do I learn the piano?",
            "How can I get better at music?",
            "How do I practise an instrument?",
        ),
        "1. Practise a little every day.\n2. Start slowly and play each note clearly.\n3. Join the notes into short "
        "phrases.\n4. Only then play faster.",
    ),
    (
        ("How do I fall asleep?", "I cannot sleep."),
        "Turn off the screens, breathe slowly and think of a quiet place. Would you like a calm story?",
    ),
)

MUSIC: tuple[tuple[tuple[str, ...], str], ...] = (
    (("legato", "legato in music"), "In music, legato means that the notes are played smoothly, joined without a "
     "break between them."),
    (("staccato",), "Staccato means that the notes are short and separated. It is the opposite of legato."),
    (("allegro",), "Allegro means fast and lively."),
    (("adagio",), "Adagio means slow and calm."),
    (("andante",), "Andante means at a walking pace."),
    (("presto",), "Presto means very fast."),
    (("forte",), "Forte means loud."),
    (("crescendo", "a crescendo"), "A crescendo means that the music grows louder little by little."),
    (("diminuendo", "a diminuendo"), "A diminuendo means that the music grows softer little by little."),
    (("tempo", "the tempo"), "Tempo is the speed of a piece of music."),
    (("rhythm",), "Rhythm is the pattern of long and short notes in time."),
    (("melody", "a melody"), "A melody is a line of notes that you can sing."),
    (("harmony",), "Harmony is the sound of several notes played together."),
    (("a chord", "chords"), "A chord is three or more notes played at the same time."),
    (("a scale", "a musical scale"), "A scale is a row of notes in order, such as do, re, mi, fa, sol, la, ti, do."),
    (("a rest", "a rest in music"), "A rest is a short silence in the music."),
    (("a slur",), "A slur is a curved line over notes that should be played legato."),
    (("a metronome",), "A metronome is a device that clicks at a steady tempo."),
    (("an orchestra",), "An orchestra is a large group of musicians who play together, led by a conductor."),
    (("a conductor",), "A conductor leads an orchestra and shows the tempo with the hands."),
    (("a symphony",), "A symphony is a long piece for an orchestra, often in four movements."),
    (("a fugue",), "A fugue is a piece in which one melody enters again and again in different voices."),
    (("a waltz",), "A waltz is a dance with three beats in each bar."),
    (("a duet",), "A duet is a piece for two players or singers."),
    (("an octave",), "An octave is the distance from one note to the next note with the same name."),
    (("fermata", "a fermata"), "A fermata is a sign that tells the player to hold a note longer."),
)  # fmt: skip

# (code, what it does): names and numbers in [slots] vary.
CODE: tuple[tuple[str, str], ...] = (
    ("for i in range([n]):\n    print(i)", "This loop prints the numbers from 0 to [m]."),
    (
        "def [f](a, b):\n    return a + b",
        "This defines a function named [f] that returns the sum of a and b.",
    ),
    (
        "def [f](a, b):\n    return a * b",
        "This defines a function named [f] that returns the product of a and b.",
    ),
    (
        "[v] = [x for x in range([n])]",
        "This makes a list named [v] with the numbers from 0 to [m].",
    ),
    ('if [v] > [n]:\n    print("big")', 'This prints "big" if [v] is larger than [n].'),
    ("print(len([v]))", "This prints the length of [v]."),
    ("[v] = sorted([v])", "This sorts [v] and stores the result under the same name."),
    ("while [v] < [n]:\n    [v] += 1", "This adds 1 to [v] again and again until it reaches [n]."),
    ("import json\nprint(json.dumps([v]))", "This prints [v] as JSON."),
    ("[v].append([n])", "This adds the number [n] to the end of the list [v]."),
    (
        '[v] = {}\n[v]["a"] = [n]',
        'This makes an empty dictionary named [v] and stores [n] under the key "a".',
    ),
    (
        'def [f](name):\n    print("Hello, " + name)',
        "This defines a function named [f] that prints a greeting.",
    ),
)

# Small programs on request: (what is asked for, the code).
PROGRAMS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("adds two numbers", "returns the sum of two numbers"), "def add(a, b):\n    return a + b"),
    (("multiplies two numbers", "returns the product of two numbers"), "def multiply(a, b):\n    return a * b"),
    (("prints hello world", "says hello to the world"), "def hello():\n    print(\"Hello, world!\")"),
    (("reverses a string", "turns a string around"), "def reverse(text):\n    return text[::-1]"),
    (("checks if a number is even", "tests whether a number is even"),
     "def is_even(number):\n    return number % 2 == 0"),
    (("computes the factorial", "returns the factorial of n"),
     "def factorial(n):\n    result = 1\n    for i in range(2, n + 1):\n        result *= i\n    return result"),
    (("finds the largest number in a list", "returns the maximum of a list"),
     "def largest(numbers):\n    return max(numbers)"),
    (("counts the words in a text", "returns the number of words"),
     "def count_words(text):\n    return len(text.split())"),
    (("computes the fibonacci numbers", "returns the first n fibonacci numbers"),
     "def fibonacci(n):\n    numbers = [0, 1]\n    while len(numbers) < n:\n        numbers.append(numbers[-1] + "
     "numbers[-2])\n    return numbers[:n]"),
    (("sorts a list", "returns a sorted list"), "def sort(numbers):\n    return sorted(numbers)"),
    (("computes the average", "returns the mean of a list"),
     "def average(numbers):\n    return sum(numbers) / len(numbers)"),
)  # fmt: skip
