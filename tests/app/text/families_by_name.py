"""More of `families`: those that write a call's name in a tag, as a key, or behind a mark."""

from __future__ import annotations

from typing import Final

_TURNS: Final = (
    "{{ bos_token }}{% for m in messages %}{% if loop.first and tools %}TOOLS"
    "{% for tool in tools %}{{ tool.function | tojson }}{% endfor %}{% endif %}"
    "{% if m.role == 'tool' %}RESULT{{ m.content }}{% else %}TURN{{ m.content or '' }}"
    "{% for call in m.tool_calls or () %}CALL{% endfor %}LAST{% endif %}END{% endfor %}"
    "{% if add_generation_prompt %}BEGUN{% endif %}"
)


def _turns(**texts: str) -> str:
    template = _TURNS
    for mark, text in texts.items():
        template = template.replace(mark, text)
    return template


_ARGUMENTS: Final = "{{ call.function.arguments | tojson }}"
_DSML: Final = "{% set dsml = '｜DSML｜' %}"
_DSML_CALL: Final = (
    '<{{ dsml }}invoke name="{{ call.function.name }}">\n'
    "{% for name, value in call.function.arguments | items %}"
    "<{{ dsml }}parameter name=\"{{ name }}\" string=\"{{ 'true' if value is string else 'false' }}"
    '">{{ value if value is string else value | tojson }}</{{ dsml }}parameter>\n{% endfor %}'
    "</{{ dsml }}invoke>\n"
)


def _deepseek(block: str) -> str:
    return _turns(
        TOOLS=f'Write <｜DSML｜{block}>, <｜DSML｜invoke name="...">',
        RESULT="<function_results>",
        TURN="<｜{{ m.role }}｜>{% if m.role == 'assistant' %}</think>{% endif %}",
        CALL=f"{{% if loop.first %}}\n\n<｜DSML｜{block}>\n{{% endif %}}{_DSML}{_DSML_CALL}"
        f"{{% if loop.last %}}</｜DSML｜{block}>{{% endif %}}",
        LAST="",
        END="<｜end▁of▁sentence｜>",
        BEGUN="<｜Assistant｜>{{ '<think>' if thinking is defined and thinking else '</think>' }}",
    )


DEEPSEEK_V32: Final = _deepseek("function_calls")
DEEPSEEK_V4: Final = _deepseek("tool_calls")
FUNCTIONARY: Final = _turns(
    TOOLS='Call them as in <function=example_function_name>{"example_name": 1}</function>\n',
    RESULT="<|start_header_id|>ipython<|end_header_id|>",
    TURN="<|start_header_id|>{{ m.role }}<|end_header_id|>",
    CALL="<function={{ call.function.name }}>" + _ARGUMENTS + "</function>",
    LAST="",
    END="<|eot_id|>",
    BEGUN="<|start_header_id|>assistant<|end_header_id|>",
)
FUNCTIONGEMMA: Final = _turns(
    TOOLS="<start_of_turn>developer\n<start_function_declaration>",
    RESULT="<start_function_response>response:",
    TURN="<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n",
    CALL="<start_function_call>call:{{ call.function.name }}{{ '{' }}"
    "{% for name, value in call.function.arguments | items %}{{ ',' if not loop.first }}{{ name }}:"
    "{{ '<escape>' + value + '<escape>' if value is string else value | tojson }}{% endfor %}}"
    "<end_function_call>",
    LAST="",
    END="<end_of_turn>\n",
    BEGUN="<start_of_turn>model\n",
)
INTERNLM: Final = _turns(
    TOOLS="<|im_start|>system name=<|plugin|>\n",
    RESULT="<|im_start|>environment name=<|plugin|>\n",
    TURN="<|im_start|>{{ m.role }}\n",
    CALL='<|action_start|><|plugin|>\n{"name": "{{ call.function.name }}", "parameters": '
    + _ARGUMENTS
    + "}<|action_end|>",
    LAST="",
    END="<|im_end|>\n",
    BEGUN="<|im_start|>assistant\n",
)
APERTUS: Final = _turns(
    TOOLS="<|developer_start|>Deliberation: {{ 'enabled' if enable_thinking is defined and "
    "enable_thinking else 'disabled' }}\nTool Capabilities:<|developer_end|>",
    RESULT="[",
    TURN="<|{{ m.role }}_start|>{% if m.reasoning_content %}<|inner_prefix|>"
    "{{ m.reasoning_content }}<|inner_suffix|>{% endif %}",
    CALL="{{ '<|tools_prefix|>[' if loop.first else ', ' }}{\"{{ call.function.name }}\": "
    + _ARGUMENTS
    + "}{{ ']<|tools_suffix|>' if loop.last }}",
    LAST="",
    END="<|{{ m.role }}_end|>",
    BEGUN="<|assistant_start|>",
)
GIGACHAT3: Final = _turns(
    TOOLS="function descriptions<|role_sep|>\n",
    RESULT="function result<|role_sep|>\n",
    TURN="{{ m.role }}<|role_sep|>\n",
    CALL='<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "{{ call.function.name }}", '
    '"arguments": ' + _ARGUMENTS + "}",
    LAST="",
    END="<|message_sep|>\n\n",
    BEGUN="assistant<|role_sep|>\n",
)
SOLAR_OPEN: Final = (
    "{% set reasoning_effort = reasoning_effort if reasoning_effort is defined else 'high' %}"
    + _turns(
        TOOLS="<|begin|>system<|content|>",
        RESULT="<|begin|>tool<|tool_response|>",
        TURN="<|begin|>{{ m.role }}{% if m.reasoning %}<|think|>{{ m.reasoning }}<|end|>"
        "<|begin|>assistant{% endif %}{{ '<|content|>' if m.content }}",
        CALL="{{ '<|tool_calls|>' if loop.first }}<|tool_call:begin|>a1b2c3d4e5"
        "<|tool_call:name|>{{ call.function.name }}<|tool_call:args|>"
        + _ARGUMENTS
        + "<|tool_call:end|>{{ '<|calls|>' if loop.last }}",
        LAST="",
        END="<|end|>",
        BEGUN="{% if reasoning_effort in ['low', 'minimal'] %}<|begin|>assistant<|think|><|end|>"
        "{% endif %}<|begin|>assistant",
    )
)
DOTS: Final = _turns(
    TOOLS="Tools: ",
    RESULT="<|tool|>",
    TURN="<|{{ m.role }}|>",
    CALL="{{ '<dots_function_call>\n' if loop.first }}<invoke name=\"{{ call.function.name }}\">\n"
    '{% for name, value in call.function.arguments | items %}<parameter name="{{ name }}">'
    "{{ value if value is string else value | tojson }}</parameter>\n{% endfor %}</invoke>\n"
    "{{ '</dots_function_call>' if loop.last }}",
    LAST="",
    END="<|end|>",
    BEGUN="<|assistant|>",
)
STEP3: Final = _turns(
    TOOLS="Tools: ",
    RESULT="<｜BOT｜>tool_response\n",
    TURN="<｜BOT｜>{{ m.role }}\n{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}"
    "\n</think>\n{% endif %}",
    CALL="{{ '<｜tool_calls_begin｜>\n' if loop.first }}<｜tool_call_begin｜>function<｜tool_sep｜>"
    '<steptml:invoke name="{{ call.function.name }}">\n'
    "{% for name, value in call.function.arguments | items %}"
    '<steptml:parameter name="{{ name }}">{{ value if value is string else value | tojson }}'
    "</steptml:parameter>\n{% endfor %}</steptml:invoke><｜tool_call_end｜>\n"
    "{{ '<｜tool_calls_end｜>' if loop.last }}",
    LAST="",
    END="<｜EOT｜>",
    BEGUN="<｜BOT｜>assistant\n<think>\n",
)
MINICPM5: Final = _turns(
    TOOLS="# Tools: ",
    RESULT="<|im_start|>tool\n",
    TURN="<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}"
    "\n</think>\n{% endif %}",
    CALL='<function name="{{ call.function.name }}">'
    '{% for name, value in call.function.arguments | items %}<param name="{{ name }}">'
    "{{ value if value is string else value | tojson }}</param>{% endfor %}</function>\n",
    LAST="",
    END="<|im_end|>\n",
    BEGUN="<|im_start|>assistant\n",
)
LONGCAT: Final = _turns(
    TOOLS="# Tools: ",
    RESULT="<longcat_tool_response>",
    TURN="[{{ m.role }}]{% if m.reasoning_content %}<longcat_think>{{ m.reasoning_content }}"
    "</longcat_think>{% endif %}",
    CALL="<longcat_tool_call>{{ call.function.name }}\n"
    "{% for name, value in call.function.arguments | items %}<longcat_arg_key>{{ name }}"
    "</longcat_arg_key>\n<longcat_arg_value>{{ value if value is string else value | tojson }}"
    "</longcat_arg_value>\n{% endfor %}</longcat_tool_call>",
    LAST="",
    END="</longcat_s>",
    BEGUN="[assistant]",
)
GRANITE_20B: Final = _turns(
    TOOLS="SYSTEM: ",
    RESULT="FUNCTION RESPONSE: ",
    TURN="{{ m.role | upper }}: ",
    CALL='<function_call> {"name": "{{ call.function.name }}", "arguments": ' + _ARGUMENTS + "}",
    LAST="",
    END="<|endoftext|>",
    BEGUN="ASSISTANT: ",
)
HUNYUAN_V3_OPEN: Final = "{%- set kind = ':opensource' %}" + _turns(
    TOOLS="<tools>",
    RESULT="<tool_responses{{ kind }}>",
    TURN="<|{{ m.role }}|>{% if m.reasoning_content %}<think{{ kind }}>{{ m.reasoning_content }}"
    "</think{{ kind }}>{% endif %}",
    CALL="{{ '<tool_calls' ~ kind ~ '>\n' if loop.first }}<tool_call{{ kind }}>"
    "{{ call.function.name }}<tool_sep{{ kind }}>\n"
    "{% for name, value in call.function.arguments | items %}"
    "<arg_key{{ kind }}>{{ name }}</arg_key{{ kind }}>\n<arg_value{{ kind }}>"
    "{{ value if value is string else value | tojson }}</arg_value{{ kind }}>\n{% endfor %}"
    "</tool_call{{ kind }}>\n{{ '</tool_calls' ~ kind ~ '>' if loop.last }}",
    LAST="",
    END="<|eos|>",
    BEGUN="<|assistant|><think{{ kind }}>",
)
KIMI_K3: Final = _turns(
    TOOLS="Tools: ",
    RESULT='<|open|>message role="tool"<|sep|>',
    TURN='<|open|>message role="{{ m.role }}"<|sep|>{% if m.reasoning_content %}'
    "<|open|>think<|sep|>{{ m.reasoning_content }}<|close|>think<|sep|>{% endif %}",
    CALL="{{ '<|open|>tools<|sep|>' if loop.first }}<|open|>call tool=\"{{ call.function.name }}\" "
    'index="{{ loop.index }}"<|sep|>{% for name, value in call.function.arguments | items %}'
    "<|open|>argument key=\"{{ name }}\" type=\"{{ 'string' if value is string else 'number' }}\""
    "<|sep|>{{ value if value is string else value | tojson }}<|close|>argument<|sep|>{% endfor %}"
    "<|close|>call<|sep|>{{ '<|close|>tools<|sep|>' if loop.last }}",
    LAST="",
    END="<|close|>message<|sep|>",
    BEGUN='<|open|>message role="assistant"<|sep|><|open|>think<|sep|>',
)
PLAMO3: Final = _turns(
    TOOLS="Tools: ",
    RESULT="<|plamo:op|>tool:",
    TURN="<|plamo:op|>{{ m.role }}:{% if m.reasoning_content %}<|plamo:begin_think:plamo|>"
    "{{ m.reasoning_content }}<|plamo:end_think:plamo|>{% endif %}",
    CALL="{{ '<|plamo:begin_tool_requests:plamo|>' if loop.first }}"
    "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>{{ call.function.name }}"
    "<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json"
    f"<|plamo:msg|>{_ARGUMENTS}<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>"
    "{{ '<|plamo:end_tool_requests:plamo|>' if loop.last }}",
    LAST="",
    END="<|plamo:tag|>",
    BEGUN="<|plamo:op|>assistant:",
)
XLAM: Final = _turns(
    TOOLS='Calls: [{"name": "tool_call_name", "arguments": {"arg1": "value1"}}, ...]\n',
    RESULT="<|start_header_id|>ipython<|end_header_id|>",
    TURN="<|start_header_id|>{{ m.role }}<|end_header_id|>",
    CALL='{{ \'[\' if loop.first else \', \' }}{"name": "{{ call.function.name }}", "arguments": '
    + _ARGUMENTS
    + "}{{ ']' if loop.last }}",
    LAST="",
    END="<|eot_id|>",
    BEGUN="<|start_header_id|>assistant<|end_header_id|>",
)
FAMILIES: Final = {
    name.lower(): value for name, value in globals().items() if name.isupper() and name[0] != "_"
}
SPECIAL: Final = (
    "｜DSML｜",
    "<｜tool_calls_begin｜>",
    "<｜tool_calls_end｜>",
    "<｜tool_call_begin｜>",
    "<｜tool_call_end｜>",
    "<｜tool_sep｜>",
    "<start_function_call>",
    "<end_function_call>",
    "<escape>",
    "<|action_start|>",
    "<|plugin|>",
    "<|action_end|>",
    "<|tools_prefix|>",
    "<|tools_suffix|>",
    "<|inner_prefix|>",
    "<|inner_suffix|>",
    "<|role_sep|>",
    "<|message_sep|>",
    "<|function_call|>",
    "<|begin|>",
    "<|think|>",
    "<|content|>",
    "<|tool_calls|>",
    "<|tool_call:begin|>",
    "<|tool_call:name|>",
    "<|tool_call:args|>",
    "<|tool_call:end|>",
    "<|calls|>",
)
# Of one family alone, as tags of others begin with the same.
SPECIAL_OF: Final = {
    "kimi_k3": ("<|open|>", "<|close|>", "<|sep|>"),
    "minicpm5": ("<function", "</function>", "<param", "</param>"),
    "plamo3": (
        "<|plamo:begin_",
        "<|plamo:end_",
        ":plamo|>",
        "<|plamo:constrain|>",
        "<|plamo:msg|>",
    ),
    "hunyuan_v3_open": (
        *(f"<{end}{name}:opensource>" for end in ("", "/") for name in ("tool_call", "tool_calls")),
        *(f"<{end}{name}:opensource>" for end in ("", "/") for name in ("arg_key", "arg_value")),
        *("<tool_sep:opensource>", "<think:opensource>", "</think:opensource>"),
    ),
}
