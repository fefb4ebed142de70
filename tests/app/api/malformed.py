"""Bodies that no server may accept, thousands of them, and a command that sends them.

`python -m tests.app.api.malformed http://127.0.0.1:8000 --model demo --count 10000` prints how many
had which status, and how long a probe of /live took meanwhile: that is the event loop's lag as a
client sees it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

JSON = "application/json"
_PROBE_EVERY_S = 0.01
Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Bad:
    """One request that must be refused. kind: what is wrong with it."""

    kind: str
    path: str
    content: bytes
    content_type: str = JSON


CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
GOOD: dict[str, Body] = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 2},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/v1/messages": CHAT,
    "/v1/embeddings": {"input": "Hi"},
}
REQUIRED = {path: next(iter(body)) for path, body in GOOD.items()}
NOT_A_NUMBER: list[Any] = ["5", [], {}, True, [1], "x" * 1000]
# Wrong values of parameters that all generating routes share.
SHARED: dict[str, list[Any]] = {
    "temperature": [*NOT_A_NUMBER, -1, 2.5, 1e300],
    "top_p": [*NOT_A_NUMBER, -0.1, 1.5],
    "top_k": [*NOT_A_NUMBER, -2, 1.5, 10**30],
    "seed": [*NOT_A_NUMBER, 0.5, 2**63, -(2**70)],
    "stop": [7, "", [""], ["a", 3], {}, ["x"] * 999, "y" * 9999],
    "stop_token_ids": [7, "a", [-1], [1.5], [10**12], [None]],
    "logit_bias": [[], "a", {"a": 1}, {"97": 500}, {"-1": 1}, {"9" * 50: 1}, {"97": "x"}],
    "stream": ["yes", 1, 0, [], {}],
    "user": [1, [], {}, "u" * 999],
    "priority": [*NOT_A_NUMBER, 10**9],
    "slo": ["fast", 1, {"tbt_ms": 0}, {"tbt_ms": "1"}, {"ttft_ms": -1}, {"nope": 1}],
    "min_tokens": [*NOT_A_NUMBER, -1, 10**9],
    "guided_choice": [[], [""], "a", [1]],
    "structured_outputs": [{}, "a", {"regex": 1}, {"choice": ["a"], "json": {}}, {"nope": 1}],
    "metadata": [1, [], {"a": 1}, {"a": None}],
}
MESSAGES: list[Any] = [
    [], {}, "hello", 7, [None], ["user"], [[]], [{}],
    [{"role": "user"}],
    [{"role": "king", "content": "x"}],
    [{"role": "user", "content": 7}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": "x", "extra": 1}],
    [{"role": "tool", "content": "x"}],
    [{"role": "assistant", "tool_calls": [{"id": "a", "function": {}}]}],
    [{"role": "user", "content": "x" * 300_000}],
]  # fmt: skip
PROMPTS: list[Any] = ["", [], [""], [[]], 7, {}, [None], [-1], [10**12], [1.5], "x" * 300_000]


def bodies(seed: int, count: int, model: str) -> Iterator[Bad]:
    """The same `count` bad requests for the same seed."""
    draw = random.Random(seed)
    makers: list[Callable[[random.Random, str], Bad]] = [
        _truncated, _bytes, _wrong_value, _wrong_value, _wrong_value, _without, _unknown, _input,
        _not_an_object, _bad_text, _deep, _flipped, _other_type,
    ]  # fmt: skip
    for number in range(count):
        if number % 200 == 199:  # the dear ones: a child process compiles, megabytes travel
            yield draw.choice([_grammar, _huge, _many_nodes])(draw, model)
        else:
            yield draw.choice(makers)(draw, model)


def _good(draw: random.Random, model: str) -> tuple[str, Body]:
    path = draw.choice(list(GOOD))
    return path, {"model": model, **GOOD[path]}


def _dump(body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode()


def _truncated(draw: random.Random, model: str) -> Bad:
    path, body = _good(draw, model)
    text = _dump(body)
    return Bad("truncated", path, text[: draw.randrange(len(text))])


def _bytes(draw: random.Random, model: str) -> Bad:
    return Bad("bytes", draw.choice(list(GOOD)), draw.randbytes(draw.randrange(200)))


def _flipped(draw: random.Random, model: str) -> Bad:
    """A structural character lost, or a stray one where none may stand."""
    path, body = _good(draw, model)
    text = bytearray(_dump(body))
    if draw.random() < 0.5:
        del text[draw.choice([i for i, char in enumerate(text) if char in b'{}:"'])]
    else:
        text[draw.choice([0, len(text) - 1])] = draw.choice(b"],[:x")
    return Bad("flipped", path, bytes(text))


def _wrong_value(draw: random.Random, model: str) -> Bad:
    path = draw.choice(["/v1/completions", "/v1/chat/completions"])
    name = draw.choice(list(SHARED))
    body = {"model": model, **GOOD[path], name: draw.choice(SHARED[name])}
    return Bad(f"wrong {name}", path, _dump(body))


def _without(draw: random.Random, model: str) -> Bad:
    path, body = _good(draw, model)
    del body[draw.choice(["model", REQUIRED[path]])]
    return Bad("missing", path, _dump(body))


def _unknown(draw: random.Random, model: str) -> Bad:
    path, body = _good(draw, model)
    name = "".join(draw.choices("abc_é猫\x01\n", k=draw.randrange(1, 40))) + "_no"
    return Bad("unknown", path, _dump({**body, name: draw.choice([None, 1, "x", [], {}])}))


def _input(draw: random.Random, model: str) -> Bad:
    path, body = _good(draw, model)
    wrong = MESSAGES if path == "/v1/chat/completions" else PROMPTS
    if path == "/v1/responses":
        wrong = [7, [], [None], [7], [{"role": "king", "content": "x"}], {}]
    return Bad("input", path, _dump({**body, REQUIRED[path]: draw.choice(wrong)}))


def _not_an_object(draw: random.Random, model: str) -> Bad:
    value = draw.choice([None, [], [{}], 1, 1.5, "text", True, [[[]]]])
    return Bad("no object", draw.choice(list(GOOD)), _dump(value))


def _bad_text(draw: random.Random, model: str) -> Bad:
    wrong = draw.choice([b"\xff", b"\xc3", b"\\ud800", b"\\x41", b"\n", b"\x00", b"\xed\xa0\x80"])
    content = b'{"model": "%s", "prompt": "%s"}' % (model.encode(), wrong)
    return Bad("text", "/v1/completions", content)


def _deep(draw: random.Random, model: str) -> Bad:
    opening = draw.choice([b"[", b'{"a":'])
    content = b'{"model": "x", "prompt": ' + opening * draw.choice([200, 1000, 50_000])
    return Bad("deep", draw.choice(list(GOOD)), content)


def _other_type(draw: random.Random, model: str) -> Bad:
    path, body = _good(draw, model)
    kind = draw.choice(["text/plain", "multipart/form-data", "application/xml", "nonsense", ""])
    return Bad("content type", path, _dump(body), kind)


def _grammar(draw: random.Random, model: str) -> Bad:
    wrong: Body = draw.choice(
        [
            {"guided_regex": "([" + "a" * draw.randrange(50)},
            {"guided_grammar": f"root ::= missing{draw.randrange(10**6)}"},
            {"guided_json": {"type": f"nonsense{draw.randrange(10**6)}"}},
            {"guided_json": "{"},
            {"guided_regex": "a" * 70_000},
        ]
    )
    return Bad("grammar", "/v1/completions", _dump({"model": model, "prompt": "a", **wrong}))


def _huge(draw: random.Random, model: str) -> Bad:
    return Bad("huge", "/v1/completions", b'{"prompt": "' + b"x" * (2 << 20) + b'"}')


def _many_nodes(draw: random.Random, model: str) -> Bad:
    body = {"model": model, "prompt": "a", "metadata": {str(i): "" for i in range(40_000)}}
    return Bad("nodes", "/v1/completions", _dump(body))


@dataclass(slots=True)
class Report:
    """statuses: how many answers had each. not_refused: kinds of what was no 4xx (none, it is
    hoped). probe_ms: what GET /live took meanwhile, ascending."""

    statuses: Counter[int]
    not_refused: list[str]
    probe_ms: list[float]
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        probes = self.probe_ms
        return {
            "num_requests": sum(self.statuses.values()),
            "seconds": round(self.seconds, 1),
            "statuses": {str(status): n for status, n in sorted(self.statuses.items())},
            "not_refused": self.not_refused[:20],
            "probe_ms": {
                "median": round(probes[len(probes) // 2], 1),
                "p99": round(probes[int(0.99 * (len(probes) - 1))], 1),
                "max": round(probes[-1], 1),
            },
        }


async def send(url: str, model: str, *, seed: int, count: int, places: int) -> Report:
    """Send them all over `places` connections while one more asks /live now and then."""
    waiting = bodies(seed, count, model)
    report = Report(Counter(), [], [], 0.0)
    begin_s = time.monotonic()

    async def sender(client: httpx.AsyncClient) -> None:
        for bad in waiting:
            headers = {"content-type": bad.content_type} if bad.content_type else {}
            answer = await client.post(bad.path, content=bad.content, headers=headers)
            report.statuses[answer.status_code] += 1
            if not 400 <= answer.status_code < 500 or not answer.json()["error"]["message"]:
                shown = f"{bad.kind}: {bad.path} {bad.content[:300]!r}"
                report.not_refused.append(f"{answer.status_code} {shown}")

    async def prober(client: httpx.AsyncClient) -> None:
        while True:
            sent_s = time.monotonic()
            await client.get("/live")
            report.probe_ms.append(1e3 * (time.monotonic() - sent_s))
            await asyncio.sleep(_PROBE_EVERY_S)

    async with httpx.AsyncClient(base_url=url, timeout=60.0) as client:
        probing = asyncio.create_task(prober(client))
        await asyncio.gather(*(sender(client) for _ in range(places)))
        probing.cancel()
    report.seconds = time.monotonic() - begin_s
    report.probe_ms.sort()
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--places", type=int, default=4, help="connections at a time")
    args = parser.parse_args()
    report = asyncio.run(
        send(args.url, args.model, seed=args.seed, count=args.count, places=args.places)
    )
    json.dump(report.as_dict(), sys.stdout, indent=2)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
