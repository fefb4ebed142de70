"""Child process that compiles grammars with the model's tokenizer, to see whether they compile.

Run as `python -m app.text.grammar_worker MODEL_PATH`. A schema or pattern from the network may
take for ever to compile; here it can be killed, and what did not compile in time never reaches a
stage, where it would hold up every stream.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from actors.stage.grammar_kinds import compile_grammar
from actors.stage.grammar_tokenizer import read_tokenizer
from app.text.lean_import import import_grammars_alone
from app.text.template_worker import serve_jobs

_MEMORY_BYTES = 1 << 30
_NO_TEXT = "no text matches it"


def main(model_path: str) -> None:
    import_grammars_alone()
    import xgrammar

    tokenizer = read_tokenizer(Path(model_path))
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer)
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    # Only what a grammar may need beside the libraries, which map gigabytes that they never touch.
    limit = psutil.Process().memory_info().vms + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def answer(job: dict[str, Any]) -> dict[str, Any]:
        try:
            grammar = compile_grammar(compiler, job["kind"], job["text"])
            matcher = xgrammar.GrammarMatcher(grammar)
        except MemoryError:
            return {"error": "it needs too much memory to compile"}
        except Exception as error:  # the library raises its own and the runtime's kinds
            return {"error": _readable(str(error))}
        return {"ok": True} if _can_begin(matcher, info.vocab_size) else {"error": _NO_TEXT}

    serve_jobs(answer)


def _can_begin(matcher: Any, vocab_size: int) -> bool:
    """Whether any token may come first. `{"$ref": "#"}` and `[^\\s\\S]` compile, but no text
    matches: in a stage such a mask leaves nothing to draw, as if the model had overflowed."""
    words_1W = np.zeros((1, -(-vocab_size // 32)), np.int32)  # torch's functions do not work here
    return not matcher.fill_next_token_bitmask(words_1W) or bool(words_1W.any())


def _readable(message: str) -> str:
    """The library's complaint in one line, without its time stamp and source file."""
    line = message.strip().splitlines()[0] if message.strip() else "it does not compile"
    return re.sub(r"^\[[^]]*\] \S+:\d+: ", "", line)[:300].rstrip(". ")


if __name__ == "__main__":
    os.nice(5)  # tokens come first
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main(sys.argv[1])
