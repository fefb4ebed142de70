"""Exercises with tools: read what is on offer, call one, see the result, say it in words.

Names of functions and of their parameters vary, so that they must be read and not remembered.
The texts are those of the chat template: see `tokenizer.CHAT_TEMPLATE`.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

import lexicon as lx
from chats import Turns, definition, general_fact, qa
from grammar import expand, pick
from small_talk import greeting

PLACES = (
    *lx.CITIES,
    "New York",
    "San Francisco",
    "Buenos Aires",
    "Mexico City",
    "Cape Town",
    "Hong Kong",
    "Rio de Janeiro",
    "Los Angeles",
    "New Delhi",
    "Tel Aviv",
    "St Petersburg",
    "Kuala Lumpur",
)
LIST_SHARE = 0.08  # of the calls: written as a list, the form of a call that was required
Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class Tool:
    """One function on offer. parameters: (name, JSON type, description)."""

    name: str
    description: str
    parameters: tuple[tuple[str, str, str], ...]

    def spec(self, rng: random.Random) -> str:
        properties: dict[str, Json] = {}
        described = rng.random() < 0.6
        for name, kind, text in self.parameters:
            properties[name] = {"type": kind, **({"description": text} if described else {})}
        schema = {
            "type": "object",
            "properties": properties,
            "required": [name for name, _, _ in self.parameters],
        }
        function = {"name": self.name, "description": self.description, "parameters": schema}
        return json.dumps({"type": "function", "function": function})


@dataclass(frozen=True, slots=True)
class Use:
    """A wish that a tool serves: the question, the call's values, its result and the answer."""

    ask: str
    values: tuple[object, ...]
    result: Json
    answer: str


def _weather(rng: random.Random) -> tuple[Tool, Use]:
    place = rng.choice(("city", "location", "place", "town"))
    tool = Tool(
        rng.choice(("get_weather", "weather", "current_weather", "weather_in", "look_up_weather")),
        rng.choice(
            ("Get the weather.", "Get current weather for a location.", "Weather of a city.")
        ),
        ((place, "string", rng.choice(("City name", "Name of the city", "Where"))),),
    )
    slots = {
        "p": rng.choice(PLACES),
        "t": str(rng.randrange(-5, 35)),
        "s": rng.choice(("sunny", "cloudy", "rainy", "windy", "clear", "foggy")),
    }
    asks = (
        "What is the weather in [p]?",
        "What's the weather {like |}in [p]{ today| now|}?",
        "How is the weather in [p]{ today|}?",
        "Is it {raining|warm|cold|sunny} in [p]?",
    )
    result: Json = {"temperature": int(slots["t"]), "sky": slots["s"]}
    answer = expand(rng, "It is [t] degrees and [s] in [p].", slots)
    return tool, Use(pick(rng, asks, slots), (slots["p"],), result, answer)


def _time(rng: random.Random) -> tuple[Tool, Use]:
    tool = Tool(
        rng.choice(("get_time", "current_time", "time_in", "clock")),
        rng.choice(("Get the local time.", "What time it is in a city.")),
        ((rng.choice(("city", "place", "timezone")), "string", "City name"),),
    )
    slots = {
        "p": rng.choice(PLACES),
        "t": f"{rng.randrange(24)}:{rng.randrange(60):02d}",
    }
    asks = ("What time is it in [p]{ now|}?", "Tell me the time in [p].", "How late is it in [p]?")
    return tool, Use(
        pick(rng, asks, slots),
        (slots["p"],),
        {"time": slots["t"]},
        expand(rng, "It is [t] in [p].", slots),
    )


def _calculator(rng: random.Random) -> tuple[Tool, Use]:
    a, b = rng.randrange(2, 500), rng.randrange(2, 100)
    word, sign, value = rng.choice(
        (("plus", "+", a + b), ("minus", "-", a - b), ("times", "*", a * b))
    )
    tool = Tool(
        rng.choice(("calculate", "calculator", "compute", "evaluate")),
        rng.choice(("Evaluate an expression.", "Do arithmetic.")),
        ((rng.choice(("expression", "formula", "sum")), "string", "What to compute"),),
    )
    asks = ("What is [a] [w] [b]?", "Compute [a] [s] [b].", "How much is [a] [s] [b]?")
    slots = {"a": str(a), "b": str(b), "w": word, "s": sign}
    text = f"{a} {sign} {b}"
    return tool, Use(pick(rng, asks, slots), (text,), {"result": value}, f"{text} = {value}")


def _message(rng: random.Random) -> tuple[Tool, Use]:
    tool = Tool(
        rng.choice(("send_message", "send_mail", "write_to", "text_message")),
        rng.choice(("Send a message.", "Send a short text to a person.")),
        (
            (rng.choice(("to", "recipient", "person")), "string", "Who gets it"),
            (rng.choice(("text", "message", "body")), "string", "What it says"),
        ),
    )
    slots = {
        "n": lx.person(rng),
        "m": rng.choice(
            (
                "dinner is ready",
                "I will be late",
                "good luck",
                "happy birthday",
                "see you tomorrow",
                "the train is here",
                "call me back",
            )
        ),
    }
    asks = ("Tell [n]: [m]", "Send [n] a message: [m]", "Write to [n]: [m]")
    return tool, Use(
        pick(rng, asks, slots),
        (slots["n"], slots["m"]),
        {"sent": True},
        expand(rng, "Done. {I told [n]|[n] has your message}.", slots),
    )


def _timer(rng: random.Random) -> tuple[Tool, Use]:
    minutes = rng.randrange(1, 60)
    tool = Tool(
        rng.choice(("set_timer", "start_timer", "timer")),
        rng.choice(("Start a timer.", "Ring after some minutes.")),
        ((rng.choice(("minutes", "duration")), "integer", "Minutes to wait"),),
    )
    asks = (
        "Set a timer for [m] minutes.",
        "Wake me in [m] minutes.",
        "Start a timer: [m] minutes.",
    )
    slots = {"m": str(minutes)}
    return tool, Use(
        pick(rng, asks, slots),
        (minutes,),
        {"started": True},
        f"The timer rings in {minutes} minutes.",
    )


def _search(rng: random.Random) -> tuple[Tool, Use]:
    topic = rng.choice((rng.choice(lx.ANIMALS), rng.choice(lx.CITIES), rng.choice(lx.FOODS)))
    tool = Tool(
        rng.choice(("search", "web_search", "find", "look_up")),
        rng.choice(("Search the web.", "Find pages about something.")),
        ((rng.choice(("query", "q", "topic")), "string", "What to look for"),),
    )
    count = rng.randrange(1, 30)
    asks = ("Search for [x].", "Look up [x].", "Find pages about [x].")
    return tool, Use(
        pick(rng, asks, {"x": topic}),
        (topic,),
        {"pages": count},
        f"I found {count} pages about {topic}.",
    )


def _light(rng: random.Random) -> tuple[Tool, Use]:
    turn_on = rng.random() < 0.5
    tool = Tool(
        rng.choice(("set_light", "switch_light", "light")),
        rng.choice(("Switch a light.", "Turn the light of a room on or off.")),
        (
            (rng.choice(("room", "where")), "string", "Name of the room"),
            (rng.choice(("on", "is_on", "enabled")), "boolean", "On or off"),
        ),
    )
    slots = {
        "r": rng.choice(("kitchen", "hall", "garden", "office", "bedroom", "cellar")),
        "o": "on" if turn_on else "off",
    }
    asks = (
        "Turn [o] the light in the [r].",
        "Light [o] in the [r], please.",
        "Switch the [r] light [o].",
    )
    return tool, Use(
        pick(rng, asks, slots),
        (slots["r"], turn_on),
        {"ok": True},
        expand(rng, "The light in the [r] is [o].", slots),
    )


KINDS: tuple[Callable[[random.Random], tuple[Tool, Use]], ...] = (
    _weather,
    _weather,
    _time,
    _calculator,
    _message,
    _timer,
    _search,
    _light,
)


def tools(rng: random.Random) -> Turns:
    """A conversation that begins with what the model may call; not every question needs it."""
    kinds = rng.sample(KINDS, rng.choice((1, 1, 2, 3)))
    offered = {tool.name: (tool, use) for tool, use in (kind(rng) for kind in kinds)}
    specs = [tool.spec(rng) for tool, _ in offered.values()]
    turns: Turns = [("system", "Tools:\n" + "\n".join(specs))]
    if rng.random() < 0.2:
        return turns + rng.choice((definition, general_fact, greeting))(rng)
    tool, use = rng.choice(list(offered.values()))
    call = json.dumps({"name": tool.name, "arguments": _arguments(tool, use)})
    as_list = rng.random() < LIST_SHARE
    turns += qa(use.ask, f"[{call}]" if as_list else f"<tool_call>{call}</tool_call>")
    if not as_list and rng.random() < 0.6:
        turns += [("tool", json.dumps(use.result)), ("assistant", use.answer)]
    return turns


def _arguments(tool: Tool, use: Use) -> Json:
    names = [name for name, _, _ in tool.parameters]
    return dict(zip(names, use.values, strict=True))
