"""Child process that renders chat templates: an immutable sandbox with limits on time and memory.

Run as `python -m app.text.template_worker`, spoken to by `worker.KillableWorker`. A template comes
with the model folder, so it is an untrusted program. Jinja's sandbox keeps it from Python's
internals; limits of the process keep it from time and memory.
"""

from __future__ import annotations

import datetime
import json
import resource
import signal
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

_MEMORY_LIMIT_BYTES: Final = 512 << 20
_MAX_RENDERED_CHARS: Final = 16 << 20


class _ConversationRefused(Exception):
    """The template itself objects to the messages (its `raise_exception`)."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here it is only a block."""

    tags = {"generation"}  # noqa: RUF012 (the attribute is jinja2's)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _refuse(message: str) -> None:
    raise _ConversationRefused(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """With the parameters of transformers' filter, in their order."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@lru_cache(maxsize=4)
def _compiled(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def render(job: dict[str, Any]) -> dict[str, str]:
    """Answer {"text": ...}, {"refused": ...} (the messages are at fault), {"broken": ...} (no
    template) or {"error": ...}."""
    try:
        pieces: list[str] = []
        num_chars = 0
        for piece in _compiled(job["template"]).generate(**job["variables"]):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > _MAX_RENDERED_CHARS:
                return {"error": "the rendered conversation is too long"}
    except _ConversationRefused as error:
        return {"refused": str(error)}
    except jinja2.TemplateSyntaxError as error:
        return {"broken": f"line {error.lineno}: {error.message}"}
    except MemoryError:
        return {"error": "the chat template needs too much memory"}
    except RecursionError:
        return {"error": "the chat template recurses too deeply"}
    except Exception as error:  # a template is a program: it may raise anything at all
        return {"error": f"{type(error).__name__}: {error}"}
    return {"text": "".join(pieces)}


def serve_jobs(answer: Callable[[dict[str, Any]], dict[str, Any]], ready: str = "ready") -> None:
    """Read a JSON job a line, write a JSON answer a line, until the input ends.

    A job names its `limit_s`; the alarm ends the process should the parent be gone by then.
    """
    out = sys.stdout.buffer
    out.write(json.dumps(ready).encode() + b"\n")
    out.flush()
    for line in sys.stdin.buffer:
        job = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, 2.0 * float(job.get("limit_s", 5.0)))
        reply = json.dumps(answer(job)).encode()
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        out.write(reply + b"\n")
        out.flush()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_LIMIT_BYTES, _MEMORY_LIMIT_BYTES))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    serve_jobs(render)
