"""A request and its parameters: plain, frozen data.

Times are seconds, on the clock of `now_s` in `Core.handle`; tokens are vocabulary ids.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

# A request tried alone ends with an error at its third lost engine:
MAX_LOSSES = 3  # the first with many others, the second in a group, the third alone
FAILS_ALWAYS = "the engine fails whenever this request runs"  # the error of one with so many
_GRAMMAR = (
    "the grammar of the request (its response_format, structured_outputs, guided field or tools)"
)
ALLOWS_NOTHING = f"{_GRAMMAR} allows nothing after the tokens so far, and not an end"
TAKES_TOO_LONG = (
    f"{_GRAMMAR} matches the tokens so far in so many ways that the next take too long to find"
)
# The errors of a request at fault itself, not of the engine that ran it.
OWN_FAULTS = frozenset({ALLOWS_NOTHING, TAKES_TOO_LONG})
YIELDS_S = 10.0  # per step of priority below 0


class FinishReason(enum.StrEnum):
    """Why a request ended (OpenAI's names, where there are any)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Objective:
    """Latency objectives of one request; None: no objective of that kind."""

    tbt_s: float | None = None
    ttft_s: float | None = None


@dataclass(frozen=True, slots=True)
class HeldPart:
    """A part of how a call is written.

    kind: "text", this very one; "json", of the schema that `text` is; "python", arguments of that
    schema in Python's syntax, or "python_or_json", with the constants of both; "until", any text up
    to this one, which ends it, and before which each of `parts` holds: "match", the whole is of
    this pattern, or "no_match"; or of `parts` "all" in this order, "maybe", the same or nothing,
    "many", the same any number of times, or "one".
    """

    kind: str
    text: str = ""
    parts: tuple[HeldPart, ...] = ()

    @property
    def num_chars(self) -> int:
        return len(self.text) + sum(part.num_chars for part in self.parts)


@dataclass(frozen=True, slots=True)
class HeldCall:
    """name: of the tool. parts: how its call is written."""

    name: str
    parts: tuple[HeldPart, ...]


@dataclass(frozen=True, slots=True)
class HeldCalls:
    """How tool calls are written that are held to the schemas of their arguments.

    opening: the mark that begins them, which no other text has. head: the text that follows it.
    calls: of each tool. separator: between two calls; None: there is one. tail: behind the last.
    Blanks with which head and tail begin may be missing.
    may_end: the answer's end may stand in place of the tail. behind, before: where given, the
    opening is one only between a mark of `behind`, or the answer's beginning, and a `before`.
    may_be_text: what follows the opening, or the answer's beginning if this is "", is a call only
    where it begins as one, with the head and the text, or one of the texts, that is the first part;
    blanks in these are optional. More calls may then follow, or, with a tail, one list of them.
    may_lack: a tool whose schema cannot be kept in this way is left out of it, as there is another
    way with the same opening.
    """

    opening: str
    head: str
    calls: tuple[HeldCall, ...]
    separator: str | None
    tail: str
    may_end: bool = False
    behind: tuple[str, ...] = ()
    before: str = ""
    may_be_text: bool = False
    may_lack: bool = False


@dataclass(frozen=True, slots=True)
class Frame:
    """What may stand before a constrained answer, or in its place.

    reasoning: the marks around it; empty: there is none. is_begun: the prompt has opened it. calls:
    the marks with which tool calls begin. marks: special tokens that calls may have. held: in what
    ways calls may be written; empty: in any. most_calls: the answer is a call in one of these ways,
    or a list of at most so many, and keeps to as much of their schemas as can be kept; 0: it need
    not call. heads: with one of these a constrained answer begins, unless it is calls; empty, or
    "" among them: it need not. tail: may end one that begins with one of these.
    """

    reasoning: tuple[str, ...] = ()
    is_begun: bool = False
    calls: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    held: tuple[HeldCalls, ...] = ()
    most_calls: int = 0
    heads: tuple[str, ...] = ()
    tail: str = ""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the output text.

    kind: "json_object", "json_schema", "strict_json_schema" (what cannot be kept is refused, not
    left out of account), "regex", "ebnf", "choice" or "text" (any: only its frame constrains it).
    text: the schema, pattern, grammar, or a JSON list of choices.
    frame: of any kind but "ebnf".
    """

    kind: str
    text: str
    frame: Frame | None = None

    @property
    def num_held_chars(self) -> int:
        """Of how calls are written, beside `text`."""
        every = () if self.frame is None else self.frame.held
        parts = {part for held in every for call in held.calls for part in call.parts}
        return sum(part.num_chars for part in parts)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are sampled, and when to stop.

    A draw depends only on (seed, position) and the logits, so a replay, another batch or
    another policy gives the same tokens. temperature 0 is argmax.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0  # 0 <= seed < 2**63
    stop_token_ids: tuple[int, ...] = ()  # end-of-sequence ids included unless ignore_eos
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None  # how many alternatives to report beside the sampled token
    prompt_logprobs: int | None = None  # the same for every prompt position
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to be generated, as the core receives it.

    output: tokens already delivered before a replay (after a failure); generation continues after
    them, and max_tokens counts them.
    group: requests with the same group share one prompt (n > 1): the core computes the
    prompt once and gives the others its KV blocks, copied where they diverge.
    pooling: "mean" or "last" asks for an embedding of the prompt instead of tokens.
    cache_salt: prefix blocks are shared only among equal salts (tenants cannot probe each other).
    adapter: the stages' adapter slot that it uses, counted from 1; 0: none. Its salt
    identifies the adapter, because slots are reused.
    priority: a request below 0 takes only what others, live ones, hardly notice (as of a batch).
    num_losses: earlier engines that were lost while running it: it is then a suspect, tried apart
    from others until it is cleared.
    is_replayed: accepted before its engine was lost, or it left it, whether or not a token came.
    has_started: there, so that it counts as waiting no longer.
    """

    request_id: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    arrival_s: float
    output: tuple[int, ...] = ()
    tenant: str = ""
    priority: int = 0  # higher goes first; below 0: in the background
    objective: Objective = field(default_factory=Objective)
    group: str | None = None
    pooling: str | None = None
    cache_salt: str = ""
    num_losses: int = 0
    adapter: int = 0
    is_replayed: bool = False
    has_started: bool = False

    @property
    def counts_from_s(self) -> float:
        """When it counts as having come: a replayed request keeps its arrival, and a priority below
        0 counts as `YIELDS_S` seconds of later arrival each, since who asks for it yields."""
        return self.arrival_s - YIELDS_S * min(0, self.priority)

    @property
    def was_accepted(self) -> bool:
        """Its client has been told nothing else, so no engine refuses it for its load."""
        return self.is_replayed or bool(self.output)
