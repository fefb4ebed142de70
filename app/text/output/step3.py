"""Step3: MiniMax-M2's tags with a prefix, in marks as DeepSeek's.

<｜tool_calls_begin｜>
<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="add">
<steptml:parameter name="a">1</steptml:parameter>
</steptml:invoke><｜tool_call_end｜>
<｜tool_calls_end｜>
"""

from __future__ import annotations

from app.text.output.minimax_m2 import MiniMaxM2
from app.text.output.tags import Tags

_ALL, _ALL_END = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
_ONE, _ONE_END, _SEPARATOR = "<｜tool_call_begin｜>", "<｜tool_call_end｜>", "<｜tool_sep｜>"


class Step3(MiniMaxM2):
    """Step-3.5 writes as Qwen3-Coder does."""

    recognized_by = ("<steptml:invoke", _ALL)
    special_tokens = (_ALL, _ALL_END, _ONE, _ONE_END, _SEPARATOR)
    openings = (_ALL,)
    closing = ("</steptml:invoke>", _ALL_END)
    call = f'{_ONE}function{_SEPARATOR}<steptml:invoke name="'
    tags = Tags('<steptml:parameter name="', '">', "</steptml:parameter>")
    argument = tags.begin
    end = _ONE_END
