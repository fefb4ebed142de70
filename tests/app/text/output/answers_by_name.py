"""More of `answers`: formats that have a call's name in a tag, as a key, or behind a mark."""

from __future__ import annotations

from typing import Any

from tests.app.text.output.answers import ADD, NOW, PLOT, PLOTTED, WRITTEN

DSML, DSML_END = "<｜DSML｜function_calls>", "</｜DSML｜function_calls>"
INVOKE, INVOKE_END = '<｜DSML｜invoke name="', "</｜DSML｜invoke>"
PARAMETER, VALUE_END = '<｜DSML｜parameter name="', "</｜DSML｜parameter>"
GIGA = "<|message_sep|>\n\nfunction call<|role_sep|>\n"
ACTION, ACTION_END = "<|action_start|><|plugin|>", "<|action_end|>"
APERTUS, APERTUS_END = "<|tools_prefix|>", "<|tools_suffix|>"
GEMMA, GEMMA_END = "<start_function_call>", "<end_function_call>"
STEP = "<｜tool_calls_begin｜>"
STEP_ONE = '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="'
STEP_END = "</steptml:invoke><｜tool_call_end｜>"
STEP_A = '<steptml:parameter name="a">1</steptml:parameter>\n'
DSML_ADD = (
    f'{INVOKE}add">\n{PARAMETER}a" string="false">1{VALUE_END}\n{PARAMETER}b" string="true">'
    f"{ADD[1]['b']}{VALUE_END}\n{INVOKE_END}"
)

WELL_FORMED_BY_NAME: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    (
        "deepseek_v32",
        f'I look.{DSML}\n{DSML_ADD}\n{INVOKE}now">\n{INVOKE_END}\n{DSML_END}Done.',
        "I look.Done.",
        [ADD, NOW],
    ),
    (  # the tag tells the type, whatever the tool declares
        "deepseek_v32",
        f'{DSML}{INVOKE}now">{PARAMETER}user id" string="true">1{VALUE_END}{PARAMETER}x" '
        f'string="false"> "</｜DSML｜parameter>" {VALUE_END}{PARAMETER}y" string="false">[1, '
        f'"{VALUE_END}"]{VALUE_END}{PARAMETER}z" string="false">True so{VALUE_END}{INVOKE_END}',
        "",
        [("now", {"user id": "1", "x": VALUE_END, "y": [1, VALUE_END], "z": "True so"})],
    ),
    (  # as some models write them
        "deepseek_v32",
        f'{DSML}\n{INVOKE}plot">\n{PLOTTED}\n{INVOKE_END}\n{DSML_END[:9]}',
        "",
        [PLOT],
    ),
    (
        "deepseek_v4",
        f"I look.<｜DSML｜tool_calls>\n{DSML_ADD}\n</｜DSML｜tool_calls>Done.",
        "I look.Done.",
        [ADD],
    ),
    (
        "functionary",
        f"I look.<function=add>{WRITTEN}</function>\n<function=plot>{PLOTTED}</function>",
        "I look.",
        [ADD, PLOT],
    ),
    (
        "functionary",
        "<function=now>{}</function> Done.<function=now>\n{}</func",
        " Done.",
        [NOW] * 2,
    ),
    (
        "functiongemma",
        f"{GEMMA}call:add{{a:1,b:<escape>{ADD[1]['b']}<escape>}}{GEMMA_END}{GEMMA}call:now{{}}"
        f"{GEMMA_END}Done.",
        "Done.",
        [ADD, NOW],
    ),
    ("functiongemma", f"{GEMMA}call:plot{PLOTTED}", "", [PLOT]),
    (
        "internlm",
        f'I look.{ACTION}\n{{"name": "add", "parameters": {WRITTEN}}}{ACTION_END}{ACTION}'
        f'{{"name": "plot", "arguments": {PLOTTED}}}\n{ACTION_END}\n',
        "I look.",
        [ADD, PLOT],
    ),
    ("internlm", f'{ACTION}{{"name": "now"}}<|action_', "", [NOW]),
    (
        "apertus",
        f'I look.{APERTUS}[{{"add": {WRITTEN}}}, {{"plot": {PLOTTED}}}]{APERTUS_END}Done.',
        "I look.Done.",
        [ADD, PLOT],
    ),
    ("apertus", f'{APERTUS}[{{"now": {{}}}}]<|tools', "", [NOW]),
    (
        "gigachat3",
        f'I look.{GIGA}{{"name": "add", "arguments": {WRITTEN}}}<|message_sep|>',
        "I look.",
        [ADD],
    ),
    (
        "gigachat3",
        f'I look.<|function_call|>{{"name": "plot", "arguments": {PLOTTED}}}',
        "I look.",
        [PLOT],
    ),
    ("gigachat3", 'function call<|role_sep|>\n{"name": "now", "arguments": {}}', "", [NOW]),
    (
        "dots",
        'I look.<dots_function_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n'
        f'<parameter name="b">{ADD[1]["b"]}</parameter>\n</invoke>\n</dots_function_call>Done.',
        "I look.Done.",
        [ADD],
    ),
    (
        "step3",
        f'I look.{STEP}\n{STEP_ONE}add">\n{STEP_A}<steptml:parameter name="b">{ADD[1]["b"]}'
        f'</steptml:parameter>\n{STEP_END}\n{STEP_ONE}now">{STEP_END}\n<｜tool_calls_end｜>Done.',
        "I look.Done.",
        [ADD, NOW],
    ),
    (
        "step3",
        f'{STEP}{STEP_ONE}now">{STEP_END[:17]}\n{STEP_ONE}rm">{STEP_END}\n{STEP_ONE}now">{STEP_END}',
        f'{STEP_ONE}rm">{STEP_END}',
        [NOW, NOW],
    ),
    (
        "minicpm5",
        'I look.<function name="add"><param name="a">1</param><param name="b"><![CDATA[<x>\n]]>'
        '</param></function>\n<function name="now">\n</function>Done.',
        "I look.Done.",
        [("add", {"a": 1, "b": "<x>\n"}), NOW],
    ),
    (
        "longcat",
        "I look.<longcat_tool_call>add\n<longcat_arg_key>a</longcat_arg_key>\n<longcat_arg_value>1"
        "</longcat_arg_value>\n</longcat_tool_call>\n<longcat_tool_call>\n"
        f'{{"name": "plot", "arguments": {PLOTTED}}}\n</longcat_tool_call>Done.',
        "I look.Done.",
        [("add", {"a": 1}), PLOT],
    ),
    (
        "granite_20b",
        f'<function_call> {{"name": "add", "arguments": {WRITTEN}}}\n<function_call>'
        '{"name": "now", "arguments": {}}',
        "",
        [ADD, NOW],
    ),
    (
        "xlam",
        f'\n[{{"name": "add", "arguments": {WRITTEN}}},\n{{"name": "now", "arguments": {{}}}}]\n',
        "",
        [ADD, NOW],
    ),
    ("gigachat3", "A function call.<|message_sep|>", "A function call.", []),
]

MALFORMED_BY_NAME = [
    ("plamo3", "<|plamo:begin_tool_requests:plamo|><|plamo:begin_tool_name:plamo|>now"),
    ("plamo3", "<|plamo:begin_tool_request:plamo|>now<|plamo:end_tool_request:plamo|>"),
    ("hunyuan_v3", "<tool_calls><tool_call>rm<tool_sep></tool_call></tool_calls>"),
    ("kimi_k3", '<|open|>tools<|sep|><|open|>call tool="rm"<|sep|><|close|>call<|sep|>'),
    ("kimi_k3", "<|open|>tools<|sep|><|open|>call tool=now<|sep|><|close|>call<|sep|>"),
    ("hunyuan_v3", "<tool_calls>[]</tool_calls>"),
    ("hunyuan_v3_open", "<tool_calls><tool_call>now<tool_sep></tool_call></tool_calls>"),
    ("step3", f'{STEP}{STEP_ONE}rm">{STEP_END}<｜tool_calls_end｜>'),
    ("step3", f'{STEP}<steptml:invoke name="now">{STEP_END}'),
    ("step3", f'{STEP}{STEP_ONE}add">{STEP_A}'),
    ("minicpm5", '<function name="rm"></function>'),
    ("minicpm5", '<function name="add"><param>1</param></function>'),
    ("dots", '<dots_function_call><invoke name="rm"></invoke></dots_function_call>'),
    ("longcat", "<longcat_tool_call>rm</longcat_tool_call>"),
    ("longcat", '<longcat_tool_call>{"name": "rm"}</longcat_tool_call>'),
    ("granite_20b", '<function_call> {"name": "rm", "arguments": {}}'),
    ("xlam", '[{"name": "rm", "arguments": {}}]'),
    ("xlam", 'The call is [{"name": "now", "arguments": {}}]'),
    ("xlam", '{"name": "now", "arguments": {}}'),
    ("deepseek_v32", f'{DSML}{INVOKE}rm">{INVOKE_END}{DSML_END}'),
    ("deepseek_v32", f"{DSML}{INVOKE}now>{INVOKE_END}{DSML_END}"),
    ("deepseek_v32", f'{DSML}{INVOKE}add">{PARAMETER}a">1{VALUE_END}{INVOKE_END}{DSML_END}'),
    ("deepseek_v32", f'{DSML}{INVOKE}add">{PARAMETER}a" string="no">1{VALUE_END}{INVOKE_END}'),
    ("deepseek_v32", f'{DSML}{INVOKE}now">{{}} so{INVOKE_END}{DSML_END}'),
    ("deepseek_v32", f"<｜DSML｜tool_calls>{DSML_ADD}"),
    ("deepseek_v4", f"{DSML}{DSML_ADD}{DSML_END}"),
    ("functionary", "<function=rm>{}</function>"),
    ("functionary", "<function=now>[1]</function>"),
    ("functionary", "<function=now>{} and</function>"),
    ("functionary", "<function=add><parameter=a>1</parameter></function>"),
    ("functiongemma", f"{GEMMA}call:rm{{}}{GEMMA_END}"),
    ("functiongemma", f"{GEMMA}call:add{{b:x}}{GEMMA_END}"),
    ("internlm", f'{ACTION}{{"name": "rm"}}{ACTION_END}'),
    ("internlm", f'<|action_start|><|interpreter|>\n{{"name": "now"}}{ACTION_END}'),
    ("apertus", f'{APERTUS}[{{"rm": {{}}}}]{APERTUS_END}'),
    ("apertus", f'{APERTUS}[{{"now": {{}}, "add": {{}}}}]{APERTUS_END}'),
    ("apertus", f"{APERTUS}[{{}}]{APERTUS_END}"),
    ("apertus", f"{APERTUS}[]{APERTUS_END}"),
    ("apertus", f'{APERTUS}[{{"now": 3}}]{APERTUS_END}'),
    ("gigachat3", '<|function_call|>{"name": "rm", "arguments": {}}'),
    ("gigachat3", "function call<|role_sep|>\nnow"),
]
