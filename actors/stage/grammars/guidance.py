"""JSON schemas, regular expressions and choices by llguidance: it keeps nearly all of JSON Schema,
needs milliseconds for a grammar and mostly well below one for a mask, and has limits for both.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from actors.scheduling.request import Frame
from actors.stage.grammars.frame import rules_of
from actors.stage.grammars.json_schema import prepared
from actors.stage.grammars.matcher import Matcher
from actors.stage.grammars.patterns import as_rust, literal

# Tokens are masked, never forced: a forced text is found by trying, and only to be drafted.
_HEAD: Final = '%llguidance {"no_forcing": true}'
# JSON is written on one line, as json.dumps does. Where any whitespace is allowed, a small model
# may write blanks for ever and the value never ends; and each blank costs a token's time.
_LAYOUT: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allow_general_unicode_escapes": True,
}
# Of one mask or token; and of all of a grammar's together, at 0.4 kB a state of the lexer.
_LIMITS: Final[dict[str, Any]] = {
    "step_max_items": 20_000,
    "step_lexer_fuel": 100_000,
    "max_lexer_states": 100_000,
}
# Tokens of these kinds are allowed together where a pattern takes all of them, as those of any text
# of JSON are (the library's own slices); else each is tried, most of a vocabulary at every mask.
_SLICES: Final = ("[a-z]{1,10}", "[a-z ]{1,10}", "[a-zA-Z0-9_]{1,10}", "[a-zA-Z0-9_ ]{1,10}")
_BEGINNING: Final = 32  # tokens, before which masks are kept for other answers
_MOST_KEPT: Final = 64  # of a grammar, of up to 32 kB each
_KEPT_S: Final = (0.0003, 0.01)  # took so long; a slower one is never hidden from who measures it
_USED_UP: Final = "too many states"  # of the lexer
_DEAD_END: Final = "NoExtensionBias"  # begins its error where nothing can follow
_PREFIX: Final = re.compile(r"^(error: |(at )?\d+\(\d+\): |failed to compile JSON schema: )+")
_ASCII: Final = "dws"  # classes of a pattern that have letters of ASCII alone


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    bos_token_id = None
    unk_token_id = None

    def __init__(self, texts: Sequence[bytes], special: Collection[int], end: int) -> None:
        self.tokens = [text or b"<[%d]>" % token for token, text in enumerate(texts)]
        self.special_token_ids = sorted(
            {*special, *(i for i, text in enumerate(texts) if not text)}
        )
        self.eos_token_id = end

    def __call__(self, text: bytes | str) -> list[int]:
        return []  # only forced texts are tokenized


class GuidanceCompiler:
    """texts: bytes of each token, empty for special ones. special: those by name."""

    def __init__(
        self,
        texts: Sequence[bytes],
        stop_token_ids: Sequence[int],
        special: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper

        vocabulary = _Vocabulary(texts, stop_token_ids, stop_token_ids[0])
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(vocabulary),
            eos_token=list(stop_token_ids),
            slices=[*LLTokenizer.general_slices(), *_SLICES],
        )
        self._special = special
        self._num_words = -(-len(texts) // 32)
        self._limits = LLParserLimits(**_LIMITS, verbose_errors=False)

    def compile(self, kind: str, text: str, frame: Frame | None = None) -> Callable[[], Matcher]:
        """Gives matchers of a grammar. Raises ValueError where it is none."""
        try:
            compiled = self._compiled(None if kind == "text" else _rule(kind, text), frame)
        except ValueError:
            if frame is not None:
                self._check_arguments(frame)
            if kind != "json_schema":
                raise
            # Perhaps for a pattern in words of another language, which need not be kept.
            rule = _json_rule(json.loads(text), is_strict=False, is_pattern=self._is_pattern)
            compiled = self._compiled(rule, frame)
        return lambda: _GuidanceMatcher(compiled, self._num_words)

    def _compiled(self, start: str | None, frame: Frame | None) -> _Compiled:
        rules = ""
        if frame is not None:
            start, rules = rules_of(start, frame, self._special, self._rule_in_frame)
        grammar = f"{_HEAD}\nstart: {start}\n{rules}\n"
        return _Compiled(lambda: self._new(grammar))

    def _rule_in_frame(self, kind: str, text: str) -> str:
        if kind == "json_schema":
            return _json_rule(json.loads(text), is_strict=False, is_pattern=self._is_pattern)
        return _rule(kind, text)

    def _check_arguments(self, frame: Frame) -> None:
        for held in frame.held:
            for call in () if held.may_lack else held.calls:  # another has what one lacks
                alone = replace(frame, held=(replace(held, calls=(call,)),), reasoning=())
                try:
                    self._compiled(None, alone)
                except ValueError as bad:
                    raise ValueError(f"{bad}, in the parameters of '{call.name}'") from bad

    def _is_pattern(self, pattern: str) -> bool:
        from llguidance import regex_to_lark

        try:
            self._new(f"{_HEAD}\nstart: /{regex_to_lark(pattern, use_ascii=_ASCII)}/\n")
        except ValueError:
            return False
        return True

    def _new(self, grammar: str) -> Any:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise ValueError(_reason(matcher.get_error()))
        return matcher


class _Compiled:
    """The matcher of a grammar that others are copied from. Copies share the states of its lexer,
    whose number is limited: once they are used up, there is a new one.

    masks: some that took long, by the tokens before. Where an answer may still be a call or text,
    every token is tried; calls of one tool begin alike.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self.first = make()
        self.masks: dict[tuple[int, ...], NDArray[np.uint32]] = {}

    def keep(self, taken: tuple[int, ...], words_W: NDArray[np.uint32]) -> None:
        if len(self.masks) >= _MOST_KEPT:
            del self.masks[next(iter(self.masks))]
        self.masks[taken] = words_W.copy()

    def renew(self, used_up: Any) -> None:
        if self.first is used_up:
            self.first = self._make()


class _GuidanceMatcher:
    def __init__(self, compiled: _Compiled, num_words: int) -> None:
        self._compiled, self._num_words = compiled, num_words
        self._taken: list[int] = []
        self._copy()

    def _copy(self) -> None:
        """Take a copy that comes as far. An error would stay with the one before."""
        for _ in range(2):  # without states, one stops on its way and tells no error
            self._origin = self._compiled.first
            self._matcher = self._origin.deep_copy()
            self._is_behind = self._matcher.try_consume_tokens(self._taken) < len(self._taken)
            if not self._is_behind:
                return
            self._compiled.renew(self._origin)

    def _goes_on(self) -> bool:
        """Whether it is worth to try again, as states of the lexer were used up by others."""
        if self._origin is self._compiled.first:
            if not self._matcher.is_error() or _USED_UP not in self._matcher.get_error():
                return False
            self._compiled.renew(self._origin)
        self._copy()
        return not self.is_lost

    @property
    def is_over(self) -> bool:
        return bool(self._matcher.is_stopped())

    @property
    def is_lost(self) -> bool:
        error = self._matcher.get_error()  # none is empty
        return self._is_behind or bool(error and not error.startswith(_DEAD_END))

    def mask(self) -> NDArray[np.uint32]:
        if len(self._taken) >= _BEGINNING:
            return self._new_mask()
        taken = tuple(self._taken)
        if (kept_W := self._compiled.masks.pop(taken, None)) is not None:
            self._compiled.masks[taken] = kept_W  # as the last one used
            return kept_W.copy()
        begin_s = time.thread_time()
        words_W = self._new_mask()
        if _KEPT_S[0] < time.thread_time() - begin_s < _KEPT_S[1] and not self._matcher.is_error():
            self._compiled.keep(taken, words_W)
        return words_W

    def _new_mask(self) -> NDArray[np.uint32]:
        words_W = np.zeros(self._num_words, np.uint32)
        self._matcher.unsafe_compute_mask_ptr(words_W.ctypes.data, words_W.nbytes)
        if self._matcher.is_error() and self._goes_on():
            self._matcher.unsafe_compute_mask_ptr(words_W.ctypes.data, words_W.nbytes)
        if self._matcher.is_stopped() and not self._matcher.is_accepting():
            words_W.fill(0)  # in place of the end tokens
        return words_W

    def take(self, token: int) -> bool:
        is_taken = bool(self._matcher.try_consume_tokens([token]))
        if not is_taken and not self._matcher.is_stopped():
            self._matcher.compute_bitmask()  # only masks tell that states are used up
            if self._goes_on():
                is_taken = bool(self._matcher.try_consume_tokens([token]))
        if is_taken:
            self._taken.append(token)
        return is_taken

    def go_back(self, num_tokens: int) -> None:
        del self._taken[len(self._taken) - num_tokens :]
        if self._matcher.is_error():
            self._copy()
        else:
            self._matcher.rollback(num_tokens)


def _rule(kind: str, text: str) -> str:
    match kind:
        case "json_object":
            return _json_rule({"type": "object"}, is_strict=False)
        case "json_schema" | "strict_json_schema":
            return _json_rule(json.loads(text), is_strict=kind == "strict_json_schema")
        case "regex":
            return _regex_rule(text)
        case "choice":
            return _regex_rule("|".join(map(literal, _choices(text))))
    raise ValueError(f"grammar kind {kind!r} is unknown")


def _json_rule(
    schema: Any, is_strict: bool, is_pattern: Callable[[str], bool] | None = None
) -> str:
    """lenient: what cannot be kept is left out of account, which else is an error."""
    options = {**_LAYOUT, "coerce_one_of": True, "lenient": not is_strict}
    schema = prepared(schema, is_strict, is_pattern)
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": options}
    else:  # true, false, or no schema
        schema = {"allOf": [schema], "x-guidance": options}
    return "%json " + json.dumps(schema)


def _regex_rule(pattern: str) -> str:
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(as_rust(pattern), use_ascii=_ASCII)}/"


def _reason(error: str) -> str:
    """The line that says what is wrong, of those that show where."""
    lines = [line for line in error.splitlines() if line.startswith("error: ")] or [error.strip()]
    return _PREFIX.sub("", lines[0].splitlines()[0])[:300]


def _choices(text: str) -> list[str]:
    choices = json.loads(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) for c in choices):
        raise ValueError("choices must be a non-empty JSON list of strings")
    return choices
