"""Whether a grammar from the network can be served: compiled off the loop, in bounded time."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Final, NamedTuple

from actors.scheduling.request import Frame, Grammar, HeldPart
from app.text.worker import (
    KillableWorker,
    WorkerDied,
    WorkerStalled,
    WorkerTimeout,
    WorkerUnavailable,
)

GRAMMAR_LIMIT_S: Final = 1.5
_CACHE_ENTRIES: Final = 4096
_MAX_WAITING: Final = 32  # of one key
_MAX_WAITING_TOGETHER: Final = 256
_DOUBTFUL_S: Final = 30.0  # how long a time-out is held against a grammar


class GrammarInvalid(Exception):
    """The grammar does not compile, or not in time. The message says why."""


class GrammarBusy(Exception):
    """Too many grammars wait to be compiled, or there is no room to compile one; try again."""


class _Verdict(NamedTuple):
    """complaint: None for a good grammar. until_s: when it is to be tried again."""

    complaint: str | None
    until_s: float = math.inf


class GrammarChecker:
    """Compiles grammars once in a child process and remembers the verdicts.

    Requests with the same grammar wait for one compilation; different ones are compiled in turns
    between API keys, so that one with many slow grammars does not keep the others out. The memory
    holds a bounded number of digests, never a grammar itself.
    """

    def __init__(self, model_path: str, *, limit_s: float = GRAMMAR_LIMIT_S) -> None:
        self._limit_s = limit_s
        self._worker = KillableWorker("app.text.grammar_worker", model_path)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        self._verdicts: OrderedDict[bytes, _Verdict] = OrderedDict()  # by digest
        self._compiling: dict[bytes, asyncio.Future[_Verdict]] = {}  # or waiting to be, by digest
        # The same by API key, each in the order of arrival. The first of the first key is compiled.
        self._waiting: OrderedDict[str, deque[tuple[Grammar, bytes]]] = OrderedDict()

    def warm(self) -> None:
        """Start the child in the background, so that the first grammar need not wait for it."""
        self._thread.submit(self._worker.start)

    async def check(self, grammar: Grammar, key: str = "") -> None:
        """Raises GrammarInvalid or GrammarBusy unless the grammar compiles in time. key: the name
        of the request's API key."""
        digest = _digest(grammar)
        verdict = self._verdicts.get(digest)
        if verdict is not None and time.monotonic() < verdict.until_s:
            self._verdicts.move_to_end(digest)
        else:
            # Not this request's to cancel: others may wait for the same grammar.
            verdict = await asyncio.shield(
                self._compiling.get(digest) or self._enqueue(grammar, digest, key)
            )
        if verdict.complaint is not None:
            raise GrammarInvalid(verdict.complaint)

    def _enqueue(self, grammar: Grammar, digest: bytes, key: str) -> asyncio.Future[_Verdict]:
        waiting = self._waiting.get(key, deque())
        if len(waiting) >= _MAX_WAITING or len(self._compiling) >= _MAX_WAITING_TOGETHER:
            raise GrammarBusy("too many grammars wait to be compiled")
        is_idle = not self._waiting
        self._waiting[key] = waiting
        waiting.append((grammar, digest))
        verdict = self._compiling[digest] = asyncio.get_running_loop().create_future()
        if is_idle:
            self._begin()
        return verdict

    def _begin(self) -> None:
        grammar, _ = next(iter(self._waiting.values()))[0]
        loop = asyncio.get_running_loop()
        loop.run_in_executor(self._thread, self._compile, grammar).add_done_callback(self._end)

    def _end(self, compiled: asyncio.Future[_Verdict]) -> None:
        if not self._waiting:  # closed
            return
        key, waiting = self._waiting.popitem(last=False)
        _, digest = waiting.popleft()
        verdict = self._compiling.pop(digest)
        if (error := compiled.exception()) is not None:
            verdict.set_exception(error)
        else:
            verdict.set_result(compiled.result())
            self._verdicts[digest] = compiled.result()
            while len(self._verdicts) > _CACHE_ENTRIES:
                self._verdicts.popitem(last=False)
        if waiting:
            self._waiting[key] = waiting  # behind the others
        if self._waiting:
            self._begin()

    def close(self) -> None:
        """End the thread and the child process."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._waiting.clear()
        for verdict in self._compiling.values():
            verdict.cancel()
        self._worker.close()

    def _compile(self, grammar: Grammar) -> _Verdict:
        job = {"grammar": asdict(grammar), "limit_s": self._limit_s}
        try:
            answer = self._worker.call(job, self._limit_s)
        except WorkerStalled as stalled:  # the grammar may be fine
            raise GrammarBusy("the compiler of grammars gets no processor") from stalled
        except WorkerUnavailable as unavailable:
            raise GrammarBusy(f"grammars cannot be compiled now: {unavailable}") from unavailable
        except WorkerTimeout:
            return _Verdict(f"does not compile within {self._limit_s:g} s", self._soon())
        except WorkerDied:
            return _Verdict("needs too much memory to compile", self._soon())
        if (error := answer.get("error")) is None:
            return _Verdict(None)
        return _Verdict(str(error), self._soon() if answer.get("is_measured") else math.inf)

    def _soon(self) -> float:
        """Until when a verdict holds that a busy machine may have spoken."""
        return time.monotonic() + _DOUBTFUL_S


def _digest(grammar: Grammar) -> bytes:
    """With a part of a call once, in however many ways it is written: schemas may be long, and this
    is done on the loop of the front.
    """
    frame = grammar.frame or Frame()
    parts = dict.fromkeys(p for held in frame.held for call in held.calls for p in call.parts)
    numbers = dict(zip(parts, range(len(parts)), strict=True))
    ways = [
        (replace(held, calls=()), [(c.name, [numbers[p] for p in c.parts]) for c in held.calls])
        for held in frame.held
    ]
    texts = [grammar.kind, grammar.text, repr(replace(frame, held=())), repr(ways)]
    _add(texts, parts)
    lengths = " ".join([str(len(text)) for text in texts])  # so that no others are the same
    written = "\n".join([lengths, *texts]).encode("utf-8", "surrogatepass")
    return hashlib.sha256(written).digest()


def _add(texts: list[str], parts: Iterable[HeldPart]) -> None:
    for part in parts:
        texts += (part.kind, part.text)
        if part.parts:
            texts.append("(")
            _add(texts, part.parts)
            texts.append(")")
