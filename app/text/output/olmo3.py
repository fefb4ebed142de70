"""OLMo 3: calls in Python's syntax, one a line, between tags.

<function_calls>
add(a=1, b="x")
now()
</function_calls>
"""

from __future__ import annotations

from collections.abc import Mapping

from actors.scheduling.request import HeldCalls
from app.text.output.interface import maybe_end
from app.text.output.json_text import Calls
from app.text.output.pieces import AnswerPieces
from app.text.output.pythonic import Pythonic
from app.text.output.source import Reading, Source

_ALL, _ALL_END = "<function_calls>", "</function_calls>"


class Olmo3(Pythonic):
    """Values are literals of Python or of JSON."""

    recognized_by = (_ALL,)
    special_tokens = (_ALL, _ALL_END)
    openings = (_ALL,)
    closing = (_ALL_END,)
    is_bare = False
    part = "python_or_json"

    @staticmethod
    def written(calls: Calls) -> str:
        ones = [Pythonic.written([call])[1:-1] for call in calls]  # without the brackets of a list
        return "\n".join([_ALL, *ones, _ALL_END]) if ones else ""

    @classmethod
    def held(cls, schemas: Mapping[str, str]) -> tuple[HeldCalls, ...]:
        """Unlike others of this syntax these have marks, so that no text begins as they do."""
        listed = super().held(schemas)[0]
        return (HeldCalls(_ALL, "\n", listed.calls, "\n", f"\n{_ALL_END}"),)

    def read_calls(self, source: Source, out: AnswerPieces, opening: str) -> Reading[None]:
        yield from self._lines(source, out)
        yield from maybe_end(source, _ALL_END)
