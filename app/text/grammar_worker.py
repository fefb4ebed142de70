"""Child process that compiles grammars with the model's tokenizer, to see whether they compile and
how long their masks take.

Run as `python -m app.text.grammar_worker MODEL_PATH`. A schema or pattern from the network may
take for ever; here it can be killed, and what did not compile in time never reaches a stage, where
it would hold up every stream.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
from numpy.typing import NDArray

from actors.stage.grammar_kinds import MaskTime, compile_grammar
from actors.stage.grammar_tokenizer import read_tokenizer
from app.text.lean_import import import_grammars_alone
from app.text.template_worker import serve_jobs

_MEMORY_BYTES: Final = 1 << 30
_NUM_TRIED: Final = 48  # tokens, of each length
_NO_TEXT: Final = "no text matches it"
_SLOW: Final = (
    "what may follow takes too long to find: it matches a text in too many ways, or repeats "
    "something more than 128 times"
)


def main(model_path: str) -> None:
    import_grammars_alone()
    import xgrammar

    tokenizer = read_tokenizer(Path(model_path))
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer)
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    trial = Trial(info.decoded_vocab, info.stop_token_ids)
    # Only what a grammar may need beside the libraries, which map gigabytes that they never touch.
    limit = psutil.Process().memory_info().vms + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def answer(job: dict[str, Any]) -> dict[str, Any]:
        try:
            grammar = compile_grammar(compiler, job["kind"], job["text"], info.vocab_size)
            complaint = trial.complaint(lambda: xgrammar.GrammarMatcher(grammar))
        except MemoryError:
            return {"error": "it needs too much memory to compile"}
        except Exception as error:  # the library raises its own and the runtime's kinds
            return {"error": _readable(str(error))}
        if complaint is None:
            return {"ok": True}
        return {"error": complaint, "is_measured": complaint == _SLOW}

    serve_jobs(answer)


class Trial:
    """Follows grammars along short tokens and along long ones, the same again where it may be: so
    the number of ways to match a text grows fastest.

    texts: of the tokens, by id. Some grammars are slow only later: a stage gives up on these.
    """

    def __init__(
        self,
        texts: Sequence[bytes],
        stop_token_ids: Sequence[int],
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        lengths_V = np.array([len(text) for text in texts])
        lengths_V[list(stop_token_ids)] = 0  # nothing follows them
        self._by_length_V = np.argsort(lengths_V, kind="stable")[np.count_nonzero(lengths_V == 0) :]
        self._words_1W = np.zeros((1, -(-len(lengths_V) // 32)), np.int32)
        self._clock = clock

    def complaint(self, new_matcher: Callable[[], Any]) -> str | None:
        """What is wrong with a grammar that compiles; None: nothing."""
        if not self._can_begin(new_matcher()):
            return _NO_TEXT
        by_length_V = self._by_length_V
        orders = (by_length_V, by_length_V[::-1])
        return _SLOW if any(self._is_slow(new_matcher(), order) for order in orders) else None

    def _can_begin(self, matcher: Any) -> bool:
        """Whether any token may come first. `{"$ref": "#"}` and `[^\\s\\S]` compile, but no text
        matches: in a stage such a mask leaves nothing to draw, as if the model had overflowed."""
        # torch's functions do not work here
        return not matcher.fill_next_token_bitmask(self._words_1W) or bool(self._words_1W.any())

    def _is_slow(self, matcher: Any, order_V: NDArray[np.intp]) -> bool:
        spent, token = MaskTime(self._clock), None
        for _ in range(_NUM_TRIED):
            begin_s = self._clock()
            is_restricted = matcher.fill_next_token_bitmask(self._words_1W)
            spent.add(begin_s)
            if not is_restricted:
                self._words_1W.fill(-1)
            token = self._next(token, order_V)
            begin_s = self._clock()
            goes_on = token is not None and matcher.accept_token(token)
            spent.add(begin_s)
            if spent.is_up or not goes_on:
                break
        return spent.is_up

    def _next(self, token: int | None, order_V: NDArray[np.intp]) -> int | None:
        """The same token if it may follow, else the first in this order that may."""
        words_W = self._words_1W[0].view(np.uint32)
        if token is not None and words_W[token // 32] >> np.uint32(token % 32) & np.uint32(1):
            return token
        allowed_V = np.unpackbits(words_W.view(np.uint8), bitorder="little")[order_V]
        first = int(allowed_V.argmax()) if allowed_V.size else 0
        return int(order_V[first]) if allowed_V.size and allowed_V[first] else None


def _readable(message: str) -> str:
    """The library's complaint in one line, without its time stamp and source file."""
    line = message.strip().splitlines()[0] if message.strip() else "it does not compile"
    return re.sub(r"^\[[^]]*\] \S+:\d+: ", "", line)[:300].rstrip(". ")


if __name__ == "__main__":
    os.nice(5)  # tokens come first
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main(sys.argv[1])
