"""More of `answers`: formats that have marks around all calls and around each."""

from __future__ import annotations

from typing import Any

from tests.app.text.output.answers import ADD, NOW, PLOT, PLOTTED, WRITTEN

DS_ALL, DS_ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DS_ONE, DS_SEP, DS_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
KIMI_ALL, KIMI_ALL_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI, KIMI_SEP, KIMI_END = (
    "<|tool_call_begin|>functions.",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
LFM, LFM_END = "<|tool_call_start|>", "<|tool_call_end|>"
SOLAR, SOLAR_ID = "<|tool_calls|>", "<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>"
SOLAR_SEP, SOLAR_END = "<|tool_call:args|>", "<|tool_call:end|>"

WELL_FORMED_BETWEEN_MARKS: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    (
        "hermes",
        f'Yes.<tool_call>\n[{{"name": "add", "arguments": {WRITTEN}}},\n'
        '{"id": "x", "type": "function", "function": {"name": "now", "arguments": "{}"}}]\n'
        "</tool_call>Done.",
        "Yes.Done.",
        [ADD, NOW],
    ),
    (
        "deepseek_v3",
        f"I look.{DS_ALL}{DS_ONE}function{DS_SEP}add\n```json\n{WRITTEN}\n```{DS_END}\n"
        f"{DS_ONE}function{DS_SEP}plot\n```json\n{PLOTTED}\n```{DS_END}{DS_ALL_END}",
        "I look.",
        [ADD, PLOT],
    ),
    ("deepseek_v3", f"{DS_ONE}function{DS_SEP}now\n```json\n{{}}\n```{DS_END} So.", "So.", [NOW]),
    ("deepseek_v3", f"{DS_ALL}\n{DS_ONE}function{DS_SEP}now\n```json\n{{}}\n``", "", [NOW]),
    (
        "deepseek_v31",
        f"I look.{DS_ALL}{DS_ONE}add{DS_SEP}{WRITTEN}{DS_END}{DS_ONE}plot{DS_SEP}{PLOTTED}{DS_END}"
        f"{DS_ALL_END}Done.",
        "I look.Done.",
        [ADD, PLOT],
    ),
    ("deepseek_v31", f"{DS_ALL}{DS_ONE}now{DS_SEP}{{}}{DS_END}<｜tool▁ca", "", [NOW]),
    ("deepseek_v31", f"{DS_ONE}function{DS_SEP}now\n{{}}", "", [NOW]),
    (
        "kimi_k2",
        f"I look.{KIMI_ALL}{KIMI}add:0{KIMI_SEP}{WRITTEN}{KIMI_END}{KIMI}plot:1{KIMI_SEP}{PLOTTED}"
        f"{KIMI_END}{KIMI_ALL_END}Done.",
        "I look.Done.",
        [ADD, PLOT],
    ),
    (
        "kimi_k2",
        f"{KIMI_ALL}\n<|tool_call_begin|>\nnow:12\n{KIMI_SEP} {{}} \n{KIMI_END}\n<|tool_c",
        "",
        [NOW],
    ),
    ("kimi_k2", f"{KIMI}now{KIMI_SEP}{{}}", "", [NOW]),
    (
        "seed_oss",
        f"I look.\n<seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n<parameter=b>"
        f"{ADD[1]['b']}</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call><function=now>"
        "</function></seed:tool_call>Done.",
        "I look.\nDone.",
        [ADD, NOW],
    ),
    (
        "minimax_m2",
        'I look.\n<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n'
        f'<parameter name="b">{ADD[1]["b"]}</parameter>\n</invoke>\n<invoke name="now">\n'
        "</invoke>\n</minimax:tool_call>Done.",
        "I look.\nDone.",
        [ADD, NOW],
    ),
    (
        "minimax_m2",
        '<minimax:tool_call><invoke name="plot"><parameter name="points">[[1, 2], {"x": [3.5]}]'
        '</parameter><parameter name="scale"> 0.5</parameter><parameter name="grid">True'
        '</parameter><parameter name="title">null</parameter></invoke></minimax:tool_c',
        "",
        [PLOT],
    ),
    (
        "minimax_m2",
        '<minimax:tool_call><invoke name="now"><parameter name="user id">x</parameter></invoke>',
        "",
        [("now", {"user id": "x"})],
    ),
    (
        "hunyuan",
        f'Yes.<tool_calls>[{{"name": "add", "arguments": {WRITTEN}}}, '
        f'{{"name": "plot", "arguments": {PLOTTED}}}]</tool_calls>Done.',
        "Yes.Done.",
        [ADD, PLOT],
    ),
    ("hunyuan", '<tool_calls>\n[\n{"name": "now", "arguments": {}}\n]\n</tool_', "", [NOW]),
    (
        "hunyuan",
        f"Yes.<tool_calls><tool_call>add\n```json\n{WRITTEN}\n```</tool_call>\n<tool_call>plot\n"
        f"```json\n{PLOTTED}\n```</tool_call></tool_calls>Done.",
        "Yes.Done.",
        [ADD, PLOT],
    ),
    ("hunyuan", "<tool_calls>\n<tool_call>now\n{}\n</tool_call>\n</tool_c", "", [NOW]),
    ("hunyuan", "<tool_calls><tool_call>now\n```json\n{}\n``", "", [NOW]),
    (
        "minimax_m1",
        f'Yes.<tool_calls>\n{{"name": "add", "arguments": {WRITTEN}}}\n'
        f'{{"name": "plot", "arguments": {PLOTTED}}}\n</tool_calls>Done.',
        "Yes.Done.",
        [ADD, PLOT],
    ),
    ("minimax_m1", '<tool_calls>{"name": "now", "arguments": {}}\n</tool_', "", [NOW]),
    (
        "olmo3",
        "Yes.<function_calls>\nadd(a=1, b='x}\\\\\"{ é')\nnow()\n"
        'plot(points=[[1, 2], {"x": [3.5]}], scale=0.5, grid=true, title=null)\n'
        "</function_calls>Done.",
        "Yes.Done.",
        [ADD, NOW, PLOT],
    ),
    (
        "olmo3",
        '<function_calls>plot(points=[true, {"a": null}]), now()</function_c',
        "",
        [("plot", {"points": [True, {"a": None}]}), NOW],
    ),
    (
        "olmo3",
        "<function_calls>\nadd(b='x\n\ny\n', a=1)\nnow()\n</function_calls>",
        "",
        [("add", {"b": "x\n\ny\n", "a": 1}), NOW],
    ),
    (  # constants of both
        "olmo3",
        "<function_calls>\nplot(points=[true, None, {'k': false}], grid=false, title=null)\n"
        "plot(grid=False)</function_calls>",
        "",
        [
            ("plot", {"points": [True, None, {"k": False}], "grid": False, "title": None}),
            ("plot", {"grid": False}),
        ],
    ),
    (
        "lfm2",
        f"Yes.{LFM}[add(a=1, b='x}}\\\\\"{{ é'), now(),\n"
        f'plot(points=[[1, 2], {{"x": [3.5]}}], scale=0.5, grid=true, title=None)]{LFM_END}Done.',
        "Yes.Done.",
        [ADD, NOW, PLOT],
    ),
    (  # as a prompt may ask for
        "lfm2",
        f'{LFM}[{{"name": "add", "arguments": {WRITTEN}}}, {{"name": "now", "arguments": {{}}}}]'
        f"{LFM_END}Done.",
        "Done.",
        [ADD, NOW],
    ),
    ("lfm2", f"{LFM}[now()]{LFM_END}\n{LFM}now()<|tool_c", "", [NOW, NOW]),
    (
        "minicpm3",
        f"{LFM}\n```python\nadd(a=1,b='x}}\\\\\"{{ é')\nnow()\n"
        'plot(points=[[1, 2], {"x": [3.5]}],scale=0.5,grid=true,title=null)\n'
        f"```\n{LFM_END}\nDone.",
        "Done.",
        [ADD, NOW, PLOT],
    ),
    ("minicpm3", f"Yes.{LFM}\nnow()\n{LFM_END}", "Yes.", [NOW]),
    (
        "nemotron",
        f'Yes.<TOOLCALL>[{{"name": "add", "arguments": {WRITTEN}}}, '
        f'{{"name": "plot", "arguments": {PLOTTED}}}]</TOOLCALL>Done.',
        "Yes.Done.",
        [ADD, PLOT],
    ),
    ("nemotron", '<TOOLCALL>\n[{"name": "now", "arguments": "{}"}]\n</TOOLC', "", [NOW]),
    (
        "solar_open",
        f"Yes.{SOLAR}{SOLAR_ID}add{SOLAR_SEP}{WRITTEN}{SOLAR_END}{SOLAR_ID}plot{SOLAR_SEP}{PLOTTED}"
        f"{SOLAR_END}<|calls|>",
        "Yes.",
        [ADD, PLOT],
    ),
    ("solar_open", f"{SOLAR_ID}now{SOLAR_SEP}{{}}", "", [NOW]),
    (
        "seed_oss",
        "<function=now>\n<parameter=user id>x</parameter></function>",
        "",
        [("now", {"user id": "x"})],
    ),
    (
        "gemma4",
        f'Yes.<|tool_call>call:add{{a:1,b:<|"|>{ADD[1]["b"]}<|"|>}}<tool_call|><|tool_call>'
        "call:now{}<tool_call|>Done.",
        "Yes.Done.",
        [ADD, NOW],
    ),
    (
        "gemma4",
        '<|tool_call>\ncall: plot {points: [[1, 2] , {<|"|>x<|"|>:[3.5]}], scale:0.5,grid:True,'
        "title:None }\n<tool_call|><|tool_call>call:now{ }<tool_c",
        "",
        [PLOT, NOW],
    ),
    (
        "gemma4",
        '<|tool_call>call:add{"a":1,"b":"x}\\\\\\"{ é"}<|tool_call>call:now{}',
        "",
        [ADD, NOW],
    ),
    (  # a text is kept as it is
        "seed_oss",
        "<function=add>\n<parameter=a>\n1\n</parameter><parameter=b>\nx\n</parameter></function>",
        "",
        [("add", {"a": 1, "b": "\nx\n"})],
    ),
]

MALFORMED_BETWEEN_MARKS = [
    ("hermes", "<tool_call>[]</tool_call>"),
    ("hermes", '<tool_call>{"function": {"name": "now"}, "name": "now"}</tool_call>'),
    ("hermes", '<tool_call>{"function": {"function": {"name": "now"}}}</tool_call>'),
    ("hermes", '<tool_call>{"function": {}}</tool_call>'),
    ("deepseek_v3", f"{DS_ALL}{DS_ONE}function{DS_SEP}rm\n```json\n{{}}\n```{DS_END}{DS_ALL_END}"),
    ("deepseek_v3", f"{DS_ALL}{DS_ONE}function{DS_SEP}now\n```json\n[1]\n```{DS_END}"),
    ("deepseek_v31", f"{DS_ALL}{DS_ONE}rm{DS_SEP}{{}}{DS_END}{DS_ALL_END}"),
    ("deepseek_v31", f"{DS_ALL} marks calls"),
    ("deepseek_v31", f'{DS_ALL}{DS_ONE}add{DS_SEP}{{"a": 1,}}{DS_END}'),
    ("kimi_k2", f"{KIMI_ALL}{KIMI}rm:0{KIMI_SEP}{{}}{KIMI_END}{KIMI_ALL_END}"),
    ("kimi_k2", f"{KIMI_ALL}{KIMI}now:0{{}}{KIMI_END}"),
    ("seed_oss", "<seed:tool_call>\n<function=rm>\n</function>\n</seed:tool_call>"),
    ("seed_oss", "<seed:tool_call>now</seed:tool_call>"),
    ("seed_oss", "<tool_call>{}</tool_call>"),
    ("minimax_m2", '<minimax:tool_call><invoke name="rm"></invoke></minimax:tool_call>'),
    ("minimax_m2", '<minimax:tool_call><invoke name="now>\n</invoke></minimax:tool_call>'),
    ("minimax_m2", '<invoke name="now"></invoke>'),
    ("minimax_m2", '<minimax:tool_call><invoke name="add"><parameter name="a">1'),
    ("hunyuan", '<tool_calls>[{"name": "rm", "arguments": {}}]</tool_calls>'),
    ("hunyuan", '<tool_calls>{"name": "now", "arguments": {}}</tool_calls>'),
    ("hunyuan", "<tool_calls>[]</tool_calls>"),
    ("hunyuan", "<tool_calls><tool_call>rm\n```json\n{}\n```</tool_call></tool_calls>"),
    ("hunyuan", "<tool_calls><tool_call>now\n```json\n[1]\n```</tool_call></tool_calls>"),
    ("minimax_m1", '<tool_calls>\n[{"name": "now", "arguments": {}}]\n</tool_calls>'),
    ("minimax_m1", '<tool_calls>\n{"name": "rm", "arguments": {}}\n</tool_calls>'),
    ("minimax_m1", "<tool_calls></tool_calls>"),
    ("gemma4", "<|tool_call>call:rm{}<tool_call|>"),
    ("gemma4", "<|tool_call>now{}<tool_call|>"),
    ("gemma4", "<|tool_call>call:now<tool_call|>"),
    ("gemma4", "<|tool_call>call:add{a:}<tool_call|>"),
    ("gemma4", "<|tool_call>call:add{a:x}<tool_call|>"),
    ("gemma4", "<|tool_call>call:add{:1}<tool_call|>"),
    ("gemma4", "<|tool_call>call:add{a:1}so<tool_call|>"),
    ("gemma4", '<|tool_call>call:add{b:<|"|>x'),
    ("gemma4", f"<|tool_call>call:add{{a:{'[' * 200}"),
    ("olmo3", "<function_calls>\nrm()\n</function_calls>"),
    ("olmo3", "<function_calls>add(1)</function_calls>"),
    ("olmo3", "now()"),
    ("olmo3", "<function_calls>\nadd(a=1"),
    ("kimi_k2", f'{KIMI}add:0{KIMI_SEP}{{"a": 1'),
    ("lfm2", f"{LFM}[rm()]{LFM_END}Done."),
    ("lfm2", f"{LFM}[add(1)]{LFM_END}"),
    ("lfm2", f"{LFM}[]{LFM_END}"),
    ("lfm2", "[now()]"),
    ("lfm2", f"{LFM}[add(a=1"),
    ("minicpm3", f"{LFM}\n```python\nrm()\n```\n{LFM_END}"),
    ("minicpm3", f"{LFM}\n```python\nprint(1)\n```\n{LFM_END}"),
    ("minicpm3", "```python\nnow()\n```"),
    ("nemotron", '<TOOLCALL>[{"name": "rm"}]</TOOLCALL>'),
    ("nemotron", '<TOOLCALL>{"name": "now"}</TOOLCALL>'),
    ("solar_open", f"{SOLAR}{SOLAR_ID}rm{SOLAR_SEP}{{}}{SOLAR_END}"),
    ("solar_open", f"{SOLAR}now{SOLAR_SEP}{{}}{SOLAR_END}"),
    ("solar_open", f"{SOLAR_ID}add{SOLAR_SEP}[1]{SOLAR_END}"),
]
