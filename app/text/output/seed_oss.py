"""Seed-OSS: calls as Qwen3-Coder's between other marks, values without line ends around them.

<seed:tool_call>
<function=add>
<parameter=a>1</parameter>
</function>
</seed:tool_call>
"""

from __future__ import annotations

from app.text.output.qwen3_coder import Qwen3Coder
from app.text.output.tags import Tags
from app.text.output.thinking import Think


class SeedThink(Think):
    """A budget of nothing stands in the prompt as reasoning that has begun."""

    opening = "<seed:think>"
    closing = "</seed:think>"
    recognized_by = ("<seed:think>",)
    special_tokens = ("<seed:think>", "</seed:think>")

    @classmethod
    def begins_in(cls, prompt: str) -> bool:
        return super().begins_in(prompt.rstrip().removesuffix("<seed:cot_budget_reflect>"))


class SeedOss(Qwen3Coder):
    """Its outer tags are optional, too."""

    recognized_by = ("<seed:tool_call>",)
    special_tokens = ("<seed:tool_call>", "</seed:tool_call>")
    openings = ("<seed:tool_call>", "<function=")
    closing = ("</function>", "</seed:tool_call>")
    tags = Tags("<parameter=", ">", "</parameter>")
