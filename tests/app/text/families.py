"""Chat templates in the manner of model families, short: what tells them apart and what they read.

The tokens that a family's tokenizer calls special are special here too (`SPECIAL`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.app.text.tiny_tokenizer import byte_level_folder

_TURNS = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{%- for call in m.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>"
    "{%- endfor %}<|im_end|>\n{% endfor %}"
)
_BEGIN = "{% if add_generation_prompt %}<|im_start|>assistant\n"
_TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"

HERMES: Final = (
    "{% if tools %}<tools>" + _TOOLS + "</tools>\nFor each call return JSON within "
    "<tool_call></tool_call> tags.{% endif %}" + _TURNS + _BEGIN + "{% endif %}"
)
QWEN3: Final = (
    HERMES.removesuffix("{% endif %}")
    + "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
QWEN3_CODER: Final = (
    "{% if tools %}" + _TOOLS + "Reply as in\n<tool_call>\n<function=example>\n<parameter=x>\n"
    "value\n</parameter>\n</function>\n</tool_call>{% endif %}" + _TURNS + _BEGIN + "{% endif %}"
)
R1: Final = (
    "{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% else %}<|Assistant|>"
    "{{ m.content.split('</think>')[-1] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
LLAMA_3: Final = (
    '{% if tools %}Respond in the format {"name": function name, "parameters": dictionary of '
    "argument name and its value}.\n" + _TOOLS + "{% endif %}{% for m in messages %}"
    "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>{% endfor %}"
    "{% if builtin_tools is defined %}<|python_tag|>{% endif %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
LLAMA_4: Final = (
    "{% if tools %}Return calls as [func_name1(params_name1=params_value1, params_name2=...), "
    "func_name2(params)]\n" + _TOOLS + "{% endif %}{% for m in messages %}{{ m.content }}<|eot|>"
    "{% endfor %}"
)
MISTRAL: Final = (
    "{% if tools %}[AVAILABLE_TOOLS]" + _TOOLS + "[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.tool_calls %}[TOOL_CALLS]{{ m.tool_calls | tojson }}"
    "{% else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}"
)
MAGISTRAL: Final = "First draft your thinking within [THINK]Your draft[/THINK]." + MISTRAL
GPT_OSS: Final = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}\n# Valid channels: "
    "analysis, commentary, final.<|end|>" + _TOOLS + "{% for m in messages %}<|start|>{{ m.role }}"
    "<|message|>{{ m.content }}<|end|>{% endfor %}{# <|channel|>analysis #}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
FAMILIES: Final = {
    name.lower(): value for name, value in globals().items() if name.isupper() and name[0] != "_"
}
SPECIAL: Final = (
    "<|eos|>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[THINK]",
    "[/THINK]",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
    "<|call|>",
    "<think>",
    "</think>",
    "<unseen>",
)


def family_folder(folder: Path, family: str) -> Path:
    """A model folder with a family's template (no weights)."""
    return byte_level_folder(folder, template=FAMILIES[family], special=SPECIAL)
