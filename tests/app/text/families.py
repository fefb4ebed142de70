"""Chat templates in the manner of model families: what tells them apart, what they read, and what
they refuse.

Each is short and in its own words, but as strict as its family's: about ids, roles that take turns,
results without calls, the type of arguments, calls a message, and where reasoning is. The tokens
that a family's tokenizer calls special are special here too (`SPECIAL`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.app.text import families_between_marks as between_marks
from tests.app.text import families_by_name as by_name
from tests.tiny_tokenizers import byte_level_folder

_FIRST: Final = (
    "{%- if messages[0].role == 'system' %}{% set rules = messages[0].content %}"
    "{% set turns = messages[1:] %}{% else %}{% set rules = '' %}{% set turns = messages %}"
    "{% endif %}"
)
_OBJECT: Final = (
    "{% if call.function.arguments is not mapping %}{{ raise_exception('no object') }}{% endif %}"
)
_ORPHANS: Final = (
    "{%- for message in turns if message.role == 'tool' %}{% if not turns"
    "|selectattr('tool_calls', 'defined')|list %}{{ raise_exception('a result without a call') }}"
    "{% endif %}{% endfor %}"
)
_ALTERNATE: Final = (
    "{%- for message in turns if message.role != 'tool' and not message.tool_calls %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant take turns') }}{% endif %}{% endfor %}"
)
_TOOLS: Final = "{% for tool in tools or [] %}{{ '\n' + tool | tojson }}{% endfor %}"


def _chatml(how: str, call: str, *, reasoning: str = "", begin: str = "") -> str:
    """how: tells the model how to call. call: writes one. begin: begins the answer."""
    return (
        _FIRST + _ORPHANS + "{% set ns = namespace(last=0) %}{% for message in turns %}"
        "{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{%- if rules or tools %}<|im_start|>system\n{{ rules }}{% if tools %}\n<tools>"
        + _TOOLS
        + f"\n</tools>\n{how}{{% endif %}}<|im_end|>\n{{% endif %}}"
        "{% for message in turns %}{% if message.role == 'tool' %}<|im_start|>user\n"
        "<tool_response>{{ message.content }}</tool_response><|im_end|>\n"
        "{% elif message.role in ['user', 'assistant'] %}<|im_start|>{{ message.role }}\n"
        + reasoning
        + "{{ message.content + '' }}{% for call in message.tool_calls or [] %}"
        + _OBJECT
        + call
        + "{% endfor %}<|im_end|>\n{% else %}{{ raise_exception('no such role') }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n" + begin + "{% endif %}"
    )


_JSON_CALL: Final = "<tool_call>\n{{ call.function | tojson }}\n</tool_call>"
_JSON: Final = "For each call return JSON within <tool_call></tool_call> tags."
HERMES: Final = _chatml(_JSON, _JSON_CALL)
QWEN3: Final = _chatml(
    _JSON,
    _JSON_CALL,
    reasoning="{% if message.reasoning_content is string and loop.index0 > ns.last %}<think>\n"
    "{{ message.reasoning_content }}\n</think>\n\n{% endif %}",
    begin="{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}",
)
QWEN3_CODER: Final = _chatml(
    "Reply as in\n<tool_call>\n<function=example>\n<parameter=x>\nvalue\n</parameter>\n</function>"
    "\n</tool_call>",
    "<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for key, value in call.function.arguments|items %}"
    "<parameter={{ key }}>\n{{ value }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
)
GLM_45: Final = (
    "[gMASK]<sop>{% if tools %}<|system|>\n<tools>"
    + _TOOLS
    + "\n</tools>\nWithin the following XML format:\n<tool_call>{function-name}\n"
    "<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n...\n</tool_call>"
    "{% endif %}{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}"
    "{{ '/nothink' if enable_thinking is defined and not enable_thinking else '' }}"
    "{% elif m.role == 'assistant' %}<|assistant|>{% if m.reasoning_content is string %}"
    "\n<think>{{ m.reasoning_content.strip() }}</think>{% else %}\n<think></think>{% endif %}"
    "{% if m.content.strip() %}{{ '\n' + m.content.strip() }}{% endif %}"
    "{% for call in m.tool_calls or [] %}"
    + _OBJECT
    + "{{ '\n<tool_call>' + call.function.name }}\n"
    "{% for k, v in call.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>"
    "{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>\n{% endfor %}"
    "</tool_call>{% endfor %}{% elif m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>{% elif m.role == 'system' %}"
    "<|system|>\n{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}"
    "<|assistant|>{{ '\n<think></think>' if enable_thinking is defined and not enable_thinking "
    "else '' }}{% endif %}"
)
GLM_4: Final = (  # no calls, and results by another role
    "[gMASK]<sop>{% if tools %}<|system|>\n# 可用工具{% for tool in tools %}"
    "{% set function = tool.function if tool.get('function') else tool %}\n\n"
    "## {{ function.name }}\n\n{{ function | tojson(indent=4, ensure_ascii=False) }}\n"
    "在调用上述函数时,请使用 Json 格式表示调用的参数。{% endfor %}{% endif %}"
    "{% for m in messages if m.role == 'system' %}<|system|>\n{{ m.content }}{% endfor %}"
    "{% for m in messages if m.role != 'system' %}{% set meta = m.get('metadata', '') %}"
    "{% if m.role == 'user' %}<|user|>\n{{ m.content }}"
    "{% elif m.role == 'assistant' and not meta %}<|assistant|>\n{{ m.content }}"
    "{% elif m.role == 'assistant' and meta %}<|assistant|>{{ meta }}\n{{ m.content }}"
    "{% elif m.role == 'observation' %}<|observation|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
GRANITE_4: Final = _chatml(_JSON, _JSON_CALL).replace("<|im_start|>", "<|start_of_role|>")
GRANITE_3: Final = (  # no calls, no results of OpenAI's form
    _FIRST + "<|start_of_role|>system<|end_of_role|>{{ rules }}{% if tools %} Call tools with "
    "<|tool_call|> and a JSON list.{% endif %}{% if thinking %} Use <think></think>, then "
    "<response></response>.{% endif %}<|end_of_text|>\n{% if tools %}"
    "<|start_of_role|>available_tools<|end_of_role|>" + _TOOLS + "<|end_of_text|>\n{% endif %}"
    "{% for message in turns if message.role in ['user', 'assistant', 'tool_response'] %}"
    "<|start_of_role|>{{ message.role }}<|end_of_role|>{{ message.content + '' }}<|end_of_text|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)
R1: Final = (
    "{{ bos_token }}{% for message in messages if message.role == 'system' %}{{ message.content }}"
    "{% endfor %}{% set ns = namespace(result=false) %}{% for message in messages %}"
    "{% if message.role == 'user' %}<|User|>{{ message.content }}{% endif %}"
    "{% if message.role == 'assistant' and message.tool_calls %}<|Assistant|>"
    "<｜tool▁calls▁begin｜>{% for call in message.tool_calls %}{{ '<｜tool▁call▁begin｜>function"
    "<｜tool▁sep｜>' + call.function.name + '\n```json\n' + call.function.arguments + "
    "'\n```<｜tool▁call▁end｜>' }}{% endfor %}<｜tool▁calls▁end｜>{% endif %}"
    "{% if message.role == 'assistant' and message.content is not none %}<|Assistant|>"
    "{{ message.content.split('</think>')[-1] }}{% endif %}"
    "{% set ns.result = message.role == 'tool' %}"
    "{% if message.role == 'tool' %}<|output|>{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and not ns.result %}<|Assistant|><think>\n{% endif %}"
)


def _llama(how: str, body: str) -> str:
    """body: writes the calls of a message."""
    return (
        "{{ bos_token }}"
        + _FIRST
        + "<|start_header_id|>system<|end_header_id|>\n\n{% if tools %}"
        + how
        + _TOOLS
        + "{% endif %}{{ rules }}<|eot_id|>{% for message in turns %}"
        "{% if message.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n"
        "{{ message.content | tojson }}"
        "{% elif 'tool_calls' in message %}<|start_header_id|>assistant<|end_header_id|>\n\n"
        + body
        + "{% else %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
        "{{ message.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
        "{% if builtin_tools is defined %}<|python_tag|>{% endif %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    )


_PYTHONIC: Final = (
    "{{ message.content }}[{% for call in message.tool_calls %}"
    + _OBJECT
    + "{{ call.function.name }}({% for key in call.function.arguments %}{{ key }}="
    '"{{ call.function.arguments[key] }}"{% if not loop.last %}, {% endif %}{% endfor %})'
    "{% if not loop.last %}, {% endif %}{% endfor %}]"
)
_LLAMA_JSON: Final = (
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and '
    "its value}."
)
_LLAMA_CALL: Final = (
    _OBJECT + '{"name": "{{ call.function.name }}", "parameters": '
    "{{ call.function.arguments | tojson }}}"
)
LLAMA_3: Final = _llama(
    _LLAMA_JSON,
    "{% if message.tool_calls|length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "{% set call = message.tool_calls[0] %}" + _LLAMA_CALL,
)
LLAMA_3_2: Final = _llama(
    "Return calls as [func_name1(params_name1=params_value1, params_name2=...), "
    "func_name2(params)]",
    _PYTHONIC,
)
LLAMA_4: Final = _llama(
    "Return calls as <|python_start|>[func_name1(param1=value1), func_name2()]<|python_end|>",
    _PYTHONIC,
)
LLAMA_4_JSON: Final = _llama(  # its own template's way
    _LLAMA_JSON,
    "<|python_start|>{{ message.content }}<|python_end|>{% for call in message.tool_calls %}"
    + _LLAMA_CALL
    + "{% endfor %}",
)


def _mistral(assistant: str, result: str, user: str = "[INST]{{ message.content }}[/INST]") -> str:
    return (
        "{{ bos_token }}"
        + _FIRST
        + _ALTERNATE
        + "{% if rules %}[SYSTEM_PROMPT]{{ rules }}[/SYSTEM_PROMPT]{% endif %}"
        "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
        "{% for message in turns %}{% if message.role == 'user' %}"
        + user
        + "{% elif message.role == 'assistant' %}"
        + assistant
        + "{{ eos_token }}{% elif message.role == 'tool' %}"
        + result
        + "{% else %}{{ raise_exception('no such role: ' + message.role) }}{% endif %}{% endfor %}"
    )


_CALL_ID: Final = (
    "{% if call.id is not string or call.id|length != 9 %}"
    "{{ raise_exception('nine letters and digits') }}{% endif %}"
)
_RESULT_ID: Final = (
    "{% if message.tool_call_id is not defined or message.tool_call_id|length != 9 %}"
    "{{ raise_exception('nine letters and digits') }}{% endif %}"
)
MISTRAL: Final = _mistral(
    "{% if message.tool_calls is defined %}[TOOL_CALLS] [{% for call in message.tool_calls %}"
    + _OBJECT
    + _CALL_ID
    + '{{ (call.function|tojson)[:-1] }}, "id": "{{ call.id }}"}{% if not loop.last %}, '
    "{% endif %}{% endfor %}]{% else %} {{ message.content + '' }}{% endif %}",
    _RESULT_ID
    + '[TOOL_RESULTS] {"content": {{ message.content }}, "call_id": "{{ message.tool_call_id }}"}'
    "[/TOOL_RESULTS]",
)
MISTRAL_2506: Final = _mistral(
    "{{ message.content + '' }}{% for call in message.tool_calls or [] %}"
    + _OBJECT
    + _CALL_ID
    + "[TOOL_CALLS]{{ call.function.name }}[CALL_ID]{{ call.id }}[ARGS]"
    "{{ call.function.arguments | tojson }}{% endfor %}",
    _RESULT_ID
    + "[TOOL_RESULTS]{{ message.tool_call_id }}[TOOL_CONTENT]{{ message.content }}[/TOOL_RESULTS]",
)
MAGISTRAL: Final = "First draft your thinking within [THINK]Your draft[/THINK]." + _mistral(
    "{% if not message.content and not message.tool_calls %}{{ raise_exception('empty') }}"
    "{% endif %}{% if message.content is string %}{{ message.content }}"
    "{% elif message.content|length > 0 %}{% for block in message['content'] %}"
    "{% if block['type'] == 'text' %}{{ block['text'] }}{% elif block['type'] == 'thinking' %}"
    "[THINK]{{ block['thinking'] }}[/THINK]{% else %}{{ raise_exception('no such block') }}"
    "{% endif %}{% endfor %}{% endif %}{% for call in message.tool_calls or [] %}[TOOL_CALLS]"
    "{% set arguments = call.function.arguments %}{% if arguments is not string %}"
    "{% set arguments = arguments|tojson %}{% endif %}"
    "{{ call.function.name + '[ARGS]' + arguments }}{% endfor %}",
    "[TOOL_RESULTS]{{ message.content }}[/TOOL_RESULTS]",
)
GPT_OSS: Final = (
    _FIRST
    + "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}\n# Valid channels: "
    "analysis, commentary, final.<|end|>{% if rules or tools %}<|start|>developer<|message|>"
    "{{ rules }}{% for tool in tools or [] %}{% set tool = tool.function %}"
    "{{ '\n// ' + tool.description + '\ntype ' + tool.name }}{% endfor %}<|end|>{% endif %}"
    "{% set last = namespace(name=none) %}{% for message in turns %}"
    "{% if message.role == 'assistant' and 'tool_calls' in message %}"
    "{% set later = turns[loop.index:]|selectattr('role', 'equalto', 'assistant')"
    "|rejectattr('tool_calls', 'defined')|list %}"
    "{% if message.content and message.thinking %}{{ raise_exception('one of the two') }}"
    "{% elif (message.content or message.thinking) and not later %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ message.content or message.thinking }}"
    "<|end|>{% endif %}{# only the first call is written #}"
    "{% set call = message.tool_calls[0] %}"
    + _OBJECT
    + "<|start|>assistant to=functions.{{ call.function.name }}<|channel|>commentary json"
    "<|message|>{{ call.function.arguments | tojson }}<|call|>"
    "{% set last.name = call.function.name %}"
    "{% elif message.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>"
    "{{ message.content + '' }}<|end|>{% set last.name = none %}"
    "{% elif message.role == 'tool' %}{% if last.name is none %}"
    "{{ raise_exception('a result without a call') }}{% endif %}"
    "<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>"
    "{{ message.content | tojson }}<|end|>"
    "{% elif message.role == 'user' %}<|start|>user<|message|>{{ message.content }}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
GEMMA_3: Final = (
    "{{ bos_token }}"
    + _FIRST
    + "{% for message in turns %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant take turns') }}{% endif %}"
    "<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}\n"
    "{% if loop.first and rules %}{{ rules + '\n\n' }}{% endif %}{% if message.content is string %}"
    "{{ message.content | trim }}{% else %}{{ raise_exception('no text') }}{% endif %}<end_of_turn>"
    "\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
PHI_4_MINI: Final = (  # reads no variable `tools`, and no calls
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'system' and message['tools'] is defined %}"
    "{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
COMMAND_R7B: Final = (
    "{{ bos_token }}"
    + _FIRST
    + "{% set ns = namespace(call=0) %}<|SYSTEM_TOKEN|>{{ rules }}{% if tools %} Write "
    "<|START_THINKING|> and a plan, <|START_ACTION|> and a JSON list of calls, or "
    "<|START_RESPONSE|> and text.{% for tool in tools %}{{ '\n' + tool.function.name + "
    "(tool.function.parameters | tojson) }}{% endfor %}"
    "{% endif %}<|END_OF_TURN_TOKEN|>{% for message in turns %}{% if message.role == 'user' %}"
    "<|USER_TOKEN|>{{ message.content }}{% elif message.role == 'tool' %}<|SYSTEM_TOKEN|>"
    "<|START_TOOL_RESULT|>{{ message.content | tojson }}<|END_TOOL_RESULT|>"
    "{% elif message.tool_calls %}<|CHATBOT_TOKEN|><|START_THINKING|>"
    "{{ message.tool_plan }}<|END_THINKING|><|START_ACTION|>["
    "{% for call in message.tool_calls %}"
    + _OBJECT
    + '{"tool_call_id": "{{ ns.call }}", "tool_name": "{{ call.function.name }}", "parameters": '
    "{{ call.function.arguments | tojson }}}{% if not loop.last %},{% endif %}"
    "{% set ns.call = ns.call + 1 %}{% endfor %}]<|END_ACTION|>{% else %}"
    "<|CHATBOT_TOKEN|><|START_RESPONSE|>{{ message.content + '' }}<|END_RESPONSE|>{% endif %}"
    "<|END_OF_TURN_TOKEN|>{% endfor %}{% if add_generation_prompt %}<|CHATBOT_TOKEN|>{% endif %}"
)
FAMILIES: Final = (
    between_marks.FAMILIES
    | by_name.FAMILIES
    | {
        name.lower(): value
        for name, value in globals().items()
        if name.isupper() and name[0] != "_"
    }
)
SPECIAL: Final = (
    "<|eos|>",
    "<|python_tag|>",
    "<|python_start|>",
    "<|python_end|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "[THINK]",
    "[/THINK]",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
    "<|call|>",
    "<|tool_call|>",
    "<|/tool_call|>",
    "<|START_THINKING|>",
    "<|END_THINKING|>",
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    "<|START_RESPONSE|>",
    "<|END_RESPONSE|>",
    "<think>",
    "</think>",
    "<unseen>",
    *between_marks.SPECIAL,
    *by_name.SPECIAL,
)


def family_folder(folder: Path, family: str) -> Path:
    """A model folder with a family's template (no weights)."""
    special = (*SPECIAL, *by_name.SPECIAL_OF.get(family, ()))
    return byte_level_folder(folder, template=FAMILIES[family], special=special)
