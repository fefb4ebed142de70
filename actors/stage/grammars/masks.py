"""Constrained output: which tokens a request's grammar allows next.

Each constrained request has a matcher. Sampling does not advance it: when the next mask is needed,
it is brought level with the tokens of the stage's persistent batch, back over drafts that were
rejected and on. So a repeated step, a replay and a preempted request all lead to the same state
without bookkeeping of their own.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from actors.scheduling.plan import DEAD_END, SLOW_GRAMMAR
from actors.scheduling.request import Grammar
from actors.stage.grammars.compiler import GrammarCompiler
from actors.stage.grammars.matcher import MaskTime, Matcher

_MAX_COMPILED = 64  # each of up to 40 MB, if much text was counted
_MOST_BEGINNINGS = 64  # of a forced text that are tokens


@dataclass(slots=True)
class _Held:
    """seen: the output tokens that it was shown. The matcher has taken the first `num_taken`: all,
    or those up to the grammar's end or a token that breaks it. ended: only end tokens may follow.
    """

    matcher: Matcher
    time: MaskTime
    seen: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    num_taken: int = 0
    ended: bool = False

    def level(self, output: NDArray[np.int32]) -> None:
        """Go back to what both outputs begin with, and on to this one's end."""
        common = min(len(self.seen), len(output))
        differs = np.flatnonzero(self.seen[:common] != output[:common])
        common = int(differs[0]) if differs.size else common
        if common < len(self.seen):
            self._go_back(common)
        for token in output[common:].tolist():
            begin_s = self.time.clock()
            is_taken = not self.ended and self.matcher.take(token)
            self.time.add(begin_s)
            if self.matcher.is_lost:
                self.time.end()
            if self.time.is_up:
                return  # no mask is made any more
            if is_taken:
                self.num_taken += 1
                self.ended = self.matcher.is_over
            else:
                # A wrong draft, or an output from outside (a client's, replayed), which alone can
                # disagree with the masks made here: that one request ends.
                self.ended = True
        self.seen = output.copy()

    def _go_back(self, num_tokens: int) -> None:
        if self.num_taken > num_tokens:
            self.matcher.go_back(self.num_taken - num_tokens)
            self.num_taken, self.ended = num_tokens, False
        elif self.num_taken == num_tokens:  # it was broken by the token after these
            self.ended = self.matcher.is_over


class GrammarMasks:
    """Compiled grammars (a bounded cache, the least recently used dropped) and their matchers.

    matchers: by request id; empty where no running request has a grammar. `compile` may be called
    from another thread than the rest.
    """

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """clock: of the time that masks take."""
        self._folder = folder
        self._clock = clock
        self._vocab_size = vocab_size
        self._eos = tuple(token for token in eos_token_ids if token < vocab_size)
        self._lock = threading.Lock()  # guards the cache, for short times
        # Held while one is compiled, which takes up to seconds. The cache is read without it: a
        # step looks its grammar up in the middle of another grammar's compilation.
        self._compiling = threading.Lock()
        self._compiler: GrammarCompiler | None = None
        self._compiled: OrderedDict[Grammar, Callable[[], Matcher]] = OrderedDict()
        self.matchers: dict[int, _Held] = {}
        # Of the running requests' grammars: those with the same one are too slow together, or many
        # of them would each take the whole time in one step.
        self._times: WeakValueDictionary[Grammar, MaskTime] = WeakValueDictionary()

    def compile(self, grammar: Grammar) -> Callable[[], Matcher]:
        """Compile, or find in the cache: gives new matchers. Raises ValueError where it is none."""
        compiled = self._find(grammar)
        if compiled is None:
            with self._compiling:
                compiled = self._find(grammar)  # compiled while this call waited for the lock
                if compiled is None:
                    compiled = self._compile(grammar)
                    with self._lock:
                        self._compiled[grammar] = compiled
                        if len(self._compiled) > _MAX_COMPILED:
                            self._compiled.popitem(last=False)
        return compiled

    def _find(self, grammar: Grammar) -> Callable[[], Matcher] | None:
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is not None:
                self._compiled.move_to_end(grammar)
            return compiled

    def mask(self, request_id: int, grammar: Grammar, output: NDArray[np.int32]) -> torch.Tensor:
        """int32 bit mask over the vocabulary of what may follow `output`.

        After the grammar's end only the end tokens are allowed, and no token once its masks have
        taken too long.
        """
        held = self._level(request_id, grammar, output)
        if held.ended and not held.time.is_up:
            words_W = np.zeros(-(-self._vocab_size // 32), np.uint32)
            for token in self._eos:
                words_W[token // 32] |= np.uint32(1 << token % 32)
        else:
            words_W = self._mask(held)
        return torch.from_numpy(words_W.view(np.int32))

    def _mask(self, held: _Held) -> NDArray[np.uint32]:
        """No token where its time is up."""
        if held.time.is_up:
            return np.zeros(-(-self._vocab_size // 32), np.uint32)
        begin_s = held.time.clock()
        words_W = held.matcher.mask()
        held.time.add(begin_s)
        if held.matcher.is_lost:
            held.time.end()
            words_W.fill(0)
        if behind := self._vocab_size % 32:  # bits may be set behind the last token
            words_W[-1] &= np.uint32((1 << behind) - 1)
        return words_W

    def why_nothing(self, request_id: int) -> int:
        """What stands in the place of a token where this request's last mask has none."""
        return SLOW_GRAMMAR if self.matchers[request_id].time.is_up else DEAD_END

    def allows_some(self, bits_W: torch.Tensor) -> bool:
        """Whether this mask has a token: a grammar may come to where nothing can follow."""
        return bool(bits_W.numpy().any())

    def forced(
        self, request_id: int, grammar: Grammar, output: NDArray[np.int32], count: int
    ) -> tuple[int, ...]:
        """Up to `count` tokens of the text that alone may follow `output`. They are guesses, since
        a model may cut the text into other tokens.

        A text is forced where all allowed tokens are beginnings of one of them, which is taken.
        Tokens are tried one by one, because a grammar may force a text without end."""
        held = self._level(request_id, grammar, output)
        tokens: list[int] = []
        while len(tokens) < count and not (held.ended or held.time.is_up or held.matcher.is_over):
            token = self._only(held)
            if token is None or not held.matcher.take(token):
                break
            tokens.append(token)
        if tokens:
            held.matcher.go_back(len(tokens))
        return tuple(tokens)

    def _only(self, held: _Held) -> int | None:
        """The longest token that may follow, if the others are its beginnings."""
        words_W = self._mask(held)
        used = np.flatnonzero(words_W)
        if not 0 < used.size <= _MOST_BEGINNINGS:
            return None
        bits = np.unpackbits(words_W[used].view(np.uint8), bitorder="little").reshape(-1, 32)
        words, places = np.nonzero(bits)
        allowed = (used[words] * 32 + places).tolist()
        known = self._get_compiler().texts
        texts = [known[token] for token in allowed]
        longest = max(texts, key=len)
        if not longest or not all(text and longest.startswith(text) for text in texts):
            return None
        return int(allowed[texts.index(longest)])

    def _level(self, request_id: int, grammar: Grammar, output: NDArray[np.int32]) -> _Held:
        """The request's matcher, having seen exactly this output, unless its time is up."""
        held = self.matchers.get(request_id)
        if held is None:
            spent = self._times.setdefault(grammar, MaskTime(self._clock))
            held = _Held(self.compile(grammar)(), spent)
            self.matchers[request_id] = held
        if not held.time.is_up:
            held.level(output)
        return held

    def _compile(self, grammar: Grammar) -> Callable[[], Matcher]:
        return self._get_compiler().compile(grammar)

    def _get_compiler(self) -> GrammarCompiler:
        """Built at the first grammar: reading the tokenizer costs about a second."""
        if self._compiler is None:
            compiler = GrammarCompiler.of_folder(self._folder, self._vocab_size, self._eos)
            self._eos = compiler.stop_token_ids
            self._compiler = compiler
        return self._compiler
