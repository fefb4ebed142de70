"""More of `families`: those that write calls between marks of their own."""

from __future__ import annotations

from typing import Final

DEEPSEEK_V31: Final = (
    "{{ bos_token }}{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %} Write "
    "<｜tool▁calls▁begin｜> and calls.{% endif %}"
    "{% set ns = namespace(asked=false) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.asked = true %}{{ '<｜User｜>' + m.content }}{% elif m.role == 'tool' %}"
    "{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}"
    "{% elif m.role == 'assistant' %}{% if ns.asked %}<｜Assistant｜></think>{% endif %}"
    "{% set ns.asked = false %}{{ m.content }}{% if m.tool_calls %}<｜tool▁calls▁begin｜>"
    "{% for call in m.tool_calls %}{{ '<｜tool▁call▁begin｜>' + call.function.name + "
    "'<｜tool▁sep｜>' + call.function.arguments + '<｜tool▁call▁end｜>' }}{% endfor %}"
    "<｜tool▁calls▁end｜>{% endif %}"
    "<｜end▁of▁sentence｜>{% endif %}{% endfor %}{% if add_generation_prompt and ns.asked %}"
    "<｜Assistant｜>{{ '<think>' if thinking is defined and thinking else '</think>' }}{% endif %}"
)
_TAGGED: Final = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}THINK"
    "{{ m.reasoning_content }}DONE{% endif %}{{ m.content }}{% if m.role == 'system' and tools "
    "or loop.first and tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% for call in m.tool_calls or () %}{% if loop.first %}FIRST{% endif %}CALL"
    "{% for name, value in call.function.arguments | items %}PARAMETER"
    "{{ value if value is string else value | tojson }}</parameter>\n{% endfor %}END"
    "{% if loop.last %}LAST{% endif %}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>BEGUN{% endif %}"
)


def _tagged(**texts: str) -> str:
    template = _TAGGED
    for mark, text in texts.items():
        template = template.replace(mark, text)
    return template


MINIMAX_M2: Final = _tagged(
    THINK="<think>",
    DONE="</think>",
    FIRST="<minimax:tool_call>\n",
    CALL='<invoke name="{{ call.function.name }}">\n',
    PARAMETER='<parameter name="{{ name }}">',
    END="</invoke>\n",
    LAST="</minimax:tool_call>",
    BEGUN="<think>\n",
)
SEED_OSS: Final = _tagged(
    THINK="<seed:think>",
    DONE="</seed:think>",
    FIRST="",
    CALL="<seed:tool_call>\n<function={{ call.function.name }}>\n",
    PARAMETER="<parameter={{ name }}>",
    END="</function>\n</seed:tool_call>",
    LAST="",
    BEGUN="",
)
# Calls and results are in one turn of the model, and so is what follows them.
GEMMA_4: Final = (
    "{% macro written(value) %}{% if value is string %}{{ '<|\"|>' + value + '<|\"|>' }}"
    "{% elif value is mapping %}{{ '{' }}{% for key, one in value | dictsort %}"
    "{{ ',' if not loop.first }}{{ key }}:{{ written(one) }}{% endfor %}{{ '}' }}"
    "{% else %}{{ value | tojson }}{% endif %}{% endmacro %}"
    "{{ bos_token }}{% set ns = namespace(open=false) %}"
    "{% if tools or messages[0].role == 'system' or enable_thinking %}<|turn>system\n"
    "{{ '<|think|>\n' if enable_thinking }}{% if messages[0].role == 'system' %}"
    "{{ messages[0].content | trim }}{% endif %}{% for tool in tools or () %}<|tool>declaration:"
    "{{ tool.function.name }}{parameters:{{ written(tool.function.parameters) }}}<tool|>"
    "{% endfor %}<turn|>\n{% endif %}"
    "{% for message in messages if message.role in ('user', 'assistant') %}"
    "{% set content = message.content or '' %}{% if message.role == 'user' %}<|turn>user\n"
    "{{ content | trim }}<turn|>\n{% set ns.open = false %}{% else %}"
    "{% if not ns.open %}<|turn>model\n{% endif %}"
    "{% set thought = message.get('reasoning') or message.get('reasoning_content') %}"
    "{% if thought and message.tool_calls %}{{ '<|channel>thought\n' + thought + '\n<channel|>' }}"
    "{% endif %}{% for call in message.tool_calls or () %}"
    "{{ '<|tool_call>call:' + call.function.name + written(call.function.arguments) + "
    "'<tool_call|>' }}{% endfor %}{% for call in message.tool_calls or () %}"
    "{% for result in messages if result.role == 'tool' and result.tool_call_id == call.id %}"
    "{{ '<|tool_response>response:' + call.function.name + '{value:' + written(result.content) + "
    "'}<tool_response|>' }}{% endfor %}{% endfor %}{{ content | trim }}"
    "{% set ns.open = message.tool_calls and not content %}"
    "{{ '<turn|>\n' if not ns.open }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and not ns.open %}<|turn>model\n"
    "{{ '<|channel>thought\n<channel|>' if not enable_thinking | default(true) }}{% endif %}"
)
FAMILIES: Final = {
    "deepseek_v31": DEEPSEEK_V31,
    "gemma_4": GEMMA_4,
    "minimax_m2": MINIMAX_M2,
    "seed_oss": SEED_OSS,
}
SPECIAL: Final = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    "<seed:tool_call>",
    "</seed:tool_call>",
    "<seed:think>",
    "</seed:think>",
    "<|tool_call>",
    "<tool_call|>",
    '<|"|>',
    "<|channel>",
    "<channel|>",
    "<|turn>",
    "<turn|>",
)
