"""Child process that compiles grammars with the model's tokenizer, to see whether they compile and
how long their masks take.

Run as `python -m app.text.grammar_worker MODEL_PATH`. A schema or pattern from the network may
take for ever; here it can be killed, and what did not compile in time never reaches a stage, where
it would hold up every stream.
"""

from __future__ import annotations

import os
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

from actors.scheduling.request import Frame, Grammar, HeldCall, HeldCalls, HeldPart
from actors.stage.grammars.compiler import GrammarCompiler
from actors.stage.grammars.matcher import MaskTime, Matcher
from app.text.lean_import import import_grammars_alone
from app.text.template_worker import serve_jobs

_MEMORY_BYTES: Final = 1 << 30
_NUM_TRIED: Final = 48  # tokens, of each length
_NO_TEXT: Final = "no text matches it"
_SLOW: Final = "what may follow takes too long to find: it matches a text in too many ways"


def main(model_path: str) -> None:
    import_grammars_alone()
    compiler = GrammarCompiler.of_folder(Path(model_path))
    compiler.compile(Grammar("json_object", ""))  # builds what all others share
    trial = Trial(compiler.texts, compiler.stop_token_ids)
    # Only what a grammar may need beside the libraries, which map gigabytes that they never touch.
    limit = psutil.Process().memory_info().vms + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def answer(job: dict[str, Any]) -> dict[str, Any]:
        try:
            complaint = trial.complaint(compiler.compile(_grammar(**job["grammar"])))
        except MemoryError:
            return {"error": "it needs too much memory to compile"}
        except Exception as error:  # the libraries raise their own and the runtime's kinds
            return {"error": str(error)[:400] or type(error).__name__}
        if complaint is None:
            return {"ok": True}
        return {"error": complaint, "is_measured": complaint == _SLOW}

    serve_jobs(answer)


def _grammar(kind: str, text: str, frame: dict[str, Any] | None) -> Grammar:
    """What `asdict` has made a dict of."""
    if frame is None:
        return Grammar(kind, text)
    held = tuple(
        HeldCalls(**{**ways, "calls": tuple(_call(**call) for call in ways["calls"])})
        for ways in frame["held"]
    )
    return Grammar(kind, text, Frame(**{**frame, "held": held}))


def _call(name: str, parts: Sequence[dict[str, Any]]) -> HeldCall:
    return HeldCall(name, tuple(_part(**part) for part in parts))


def _part(kind: str, text: str, parts: Sequence[dict[str, Any]]) -> HeldPart:
    return HeldPart(kind, text, tuple(_part(**part) for part in parts))


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
        self._clock = clock

    def complaint(self, new_matcher: Callable[[], Matcher]) -> str | None:
        """What is wrong with a grammar that compiles; None: nothing."""
        # `{"$ref": "#"}` and `[^\s\S]` compile, but no text matches: in a stage such a mask
        # leaves nothing to draw, as if the model had overflowed.
        first = new_matcher()
        if not first.mask().any() and not first.is_lost:
            return _NO_TEXT
        by_length_V = self._by_length_V
        orders = (by_length_V, by_length_V[::-1])
        return _SLOW if any(self._is_slow(new_matcher(), order) for order in orders) else None

    def _is_slow(self, matcher: Matcher, order_V: NDArray[np.intp]) -> bool:
        spent, token = MaskTime(self._clock), None
        for _ in range(_NUM_TRIED):
            begin_s = self._clock()
            words_W = matcher.mask()
            spent.add(begin_s)
            token = _next(token, order_V, words_W)
            begin_s = self._clock()
            goes_on = token is not None and matcher.take(token)
            spent.add(begin_s)
            if spent.is_up or not goes_on:
                break
        return spent.is_up or matcher.is_lost


def _next(token: int | None, order_V: NDArray[np.intp], words_W: NDArray[np.uint32]) -> int | None:
    """The same token if it may follow, else the first in this order that may."""
    if token is not None and words_W[token // 32] >> np.uint32(token % 32) & np.uint32(1):
        return token
    allowed_V = np.unpackbits(words_W.view(np.uint8), bitorder="little")[order_V]
    first = int(allowed_V.argmax()) if allowed_V.size else 0
    return int(order_V[first]) if allowed_V.size and allowed_V[first] else None


if __name__ == "__main__":
    os.nice(5)  # tokens come first
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main(sys.argv[1])
