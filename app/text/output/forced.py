"""Calls forced by a grammar: the whole answer is one JSON call or a list of calls."""

from __future__ import annotations

from app.text.output.call_reader import CallReader
from app.text.output.interface import ToolFormat
from app.text.output.pieces import AnswerPart, AnswerPieces, CallDelta
from app.text.output.source import Reading, Source


class Forced(ToolFormat):
    """The grammar makes every call valid, so arguments are passed on unchanged as they arrive."""

    def read(self, source: Source, out: AnswerPieces) -> Reading[None]:
        out.part = AnswerPart.ANSWER
        call, announced = CallReader(), False
        while True:
            text = source.text[source.at :]
            source.at = len(source.text)
            source.forget()
            while text:
                text = call.push(text)
                if call.name is not None and not (call.broken and not announced):
                    arguments = call.pop_arguments()
                    if not announced:
                        out.call(CallDelta(out.num_calls, call.name, arguments))
                        out.num_calls += 1
                        announced = True
                    elif arguments:
                        out.call(CallDelta(out.num_calls - 1, None, arguments))
                if call.broken:
                    out.text(("" if announced else call.raw) + text)
                    yield from source.shown_until((), out.text)
                    return
                if call.done:
                    call, announced = CallReader(), False
            if source.ended:
                out.text("" if announced else call.raw)
                return
            yield
