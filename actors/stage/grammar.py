"""Constrained output: which tokens a request's grammar allows next (xgrammar).

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
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from actors.scheduling.plan import DEAD_END, SLOW_GRAMMAR
from actors.scheduling.request import Grammar
from actors.stage.grammar_kinds import MaskTime, compile_grammar
from actors.stage.grammar_tokenizer import read_tokenizer

_MAX_COMPILED = 256
_MOST_BEGINNINGS = 64  # of a forced text that are tokens
_MAX_COMPILER_BYTES = 256 << 20


@dataclass(slots=True)
class _Matcher:
    """seen: the output tokens that it was shown. The matcher has taken the first `num_taken`: all,
    or those up to the grammar's end or a token that breaks it. ended: only end tokens may follow.
    """

    matcher: Any
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
            is_taken = not self.ended and self.matcher.accept_token(token)
            self.time.add(begin_s)
            if self.time.is_up:
                return  # no mask is made any more
            if is_taken:
                self.num_taken += 1
                self.ended = self.matcher.is_terminated()
            else:
                # A wrong draft, or an output from outside (a client's, replayed), which alone can
                # disagree with the masks made here: that one request ends.
                self.ended = True
        self.seen = output.copy()

    def _go_back(self, num_tokens: int) -> None:
        if self.num_taken > num_tokens:
            self.matcher.rollback(self.num_taken - num_tokens)
            self.num_taken, self.ended = num_tokens, False
        elif self.num_taken == num_tokens:  # it was broken by the token after these
            self.ended = self.matcher.is_terminated()


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
        self._compiler: Any = None
        self._texts: list[bytes] = []  # of each token, once there is a compiler
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()
        self.matchers: dict[int, _Matcher] = {}
        # Of the running requests' grammars: those with the same one are too slow together, or many
        # of them would each take the whole time in one step.
        self._times: WeakValueDictionary[Grammar, MaskTime] = WeakValueDictionary()

    def compile(self, grammar: Grammar) -> Any:
        """Compile, or find in the cache. Raises ValueError for what is not a grammar."""
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

    def _find(self, grammar: Grammar) -> Any:
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is not None:
                self._compiled.move_to_end(grammar)
            return compiled

    def mask(
        self, request_id: int, grammar: Grammar, output: NDArray[np.int32]
    ) -> torch.Tensor | None:
        """int32 bit mask over the vocabulary of what may follow `output`; None allows all.

        After the grammar's end only the end tokens are allowed, and no token once its masks have
        taken too long.
        """
        import xgrammar

        held = self._level(request_id, grammar, output)
        bits_1W = xgrammar.allocate_token_bitmask(1, self._vocab_size)
        if held.time.is_up:
            return bits_1W[0].zero_()
        if held.ended:
            words_W = bits_1W[0].zero_().numpy().view(np.uint32)
            for token in self._eos:
                words_W[token // 32] |= np.uint32(1 << token % 32)
            return bits_1W[0]
        begin_s = self._clock()
        is_restricted = held.matcher.fill_next_token_bitmask(bits_1W)
        held.time.add(begin_s)
        return bits_1W[0] if is_restricted else None

    def why_nothing(self, request_id: int) -> int:
        """What stands in the place of a token where this request's last mask has none."""
        return SLOW_GRAMMAR if self.matchers[request_id].time.is_up else DEAD_END

    def allows_some(self, bits_W: torch.Tensor) -> bool:
        """Whether this mask has a token: a grammar may come to where nothing can follow."""
        words_W = bits_W.numpy().view(np.uint32)
        behind = self._vocab_size % 32  # xgrammar may set bits behind the last token
        last = words_W[-1] & np.uint32((1 << behind) - 1) if behind else words_W[-1]
        return bool(last or words_W[:-1].any())

    def forced(
        self, request_id: int, grammar: Grammar, output: NDArray[np.int32], count: int
    ) -> tuple[int, ...]:
        """Up to `count` tokens of the text that alone may follow `output`. They are guesses, since
        a model may cut the text into other tokens.

        A text is forced where all allowed tokens are beginnings of one of them, which is taken.
        Tokens are tried one by one, because a grammar may force a text without end."""
        held = self._level(request_id, grammar, output)
        tokens: list[int] = []
        while len(tokens) < count and not (
            held.ended or held.time.is_up or held.matcher.is_terminated()
        ):
            begin_s = self._clock()
            token = self._only(held.matcher)
            is_taken = token is not None and held.matcher.accept_token(token)
            held.time.add(begin_s)
            if token is None or not is_taken:
                break
            tokens.append(token)
        if tokens:
            held.matcher.rollback(len(tokens))
        return tuple(tokens)

    def _only(self, matcher: Any) -> int | None:
        """The longest token that may follow, if the others are its beginnings."""
        import xgrammar

        bits_1W = xgrammar.allocate_token_bitmask(1, self._vocab_size)
        if not matcher.fill_next_token_bitmask(bits_1W):
            return None  # all may follow
        words_W = bits_1W[0].numpy().view(np.uint32)
        if behind := self._vocab_size % 32:  # xgrammar may set bits behind the last token
            words_W[-1] &= np.uint32((1 << behind) - 1)
        used = np.flatnonzero(words_W)
        if not 0 < used.size <= _MOST_BEGINNINGS:
            return None
        bits = np.unpackbits(words_W[used].view(np.uint8), bitorder="little").reshape(-1, 32)
        words, places = np.nonzero(bits)
        allowed = (used[words] * 32 + places).tolist()
        texts = [self._texts[token] for token in allowed]
        longest = max(texts, key=len)
        if not longest or not all(text and longest.startswith(text) for text in texts):
            return None
        return int(allowed[texts.index(longest)])

    def _level(self, request_id: int, grammar: Grammar, output: NDArray[np.int32]) -> _Matcher:
        """The request's matcher, having seen exactly this output, unless its time is up."""
        import xgrammar

        held = self.matchers.get(request_id)
        if held is None:
            spent = self._times.setdefault(grammar, MaskTime(self._clock))
            held = _Matcher(xgrammar.GrammarMatcher(self.compile(grammar)), spent)
            self.matchers[request_id] = held
        if not held.time.is_up:
            held.level(output)
        return held

    def _compile(self, grammar: Grammar) -> Any:
        compiler = self._get_compiler()
        try:
            return compile_grammar(compiler, grammar.kind, grammar.text, self._vocab_size)
        except (RuntimeError, ValueError, TypeError) as bad:
            raise ValueError(f"{grammar.kind} cannot be compiled: {bad}") from bad

    def _get_compiler(self) -> Any:
        """Built at the first grammar: reading the tokenizer costs about a second."""
        if self._compiler is None:
            import xgrammar

            try:
                tokenizer = read_tokenizer(self._folder)
            except (OSError, ValueError) as bad:
                if isinstance(bad, OSError) and bad.errno is not None:
                    raise  # no memory, no files: nothing is known of the folder
                raise ValueError(f"{self._folder} has no tokenizer for grammars: {bad}") from bad
            # The front stops at the tokenizer's end token, too, whatever the model's files list.
            own = tokenizer.eos_token_id
            if own is not None and own < self._vocab_size and own not in self._eos:
                self._eos = (*self._eos, int(own))
            if not self._eos:
                raise ValueError("the model names no end-of-sequence token: grammars cannot end")
            info = xgrammar.TokenizerInfo.from_huggingface(
                tokenizer, vocab_size=self._vocab_size, stop_token_ids=list(self._eos)
            )
            self._texts = info.decoded_vocab
            self._compiler = xgrammar.GrammarCompiler(
                info, max_threads=1, cache_limit_bytes=_MAX_COMPILER_BYTES
            )
        return self._compiler
