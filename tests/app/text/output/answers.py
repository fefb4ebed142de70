"""Answers in every format of tool calls: what holds calls, and what holds none."""

from __future__ import annotations

import json
from typing import Any

ADD = ("add", {"a": 1, "b": 'x}\\"{ é'})
NOW = ("now", {})
PLOT = ("plot", {"points": [[1, 2], {"x": [3.5]}], "scale": 0.5, "grid": True, "title": None})
WRITTEN = json.dumps(ADD[1], ensure_ascii=False)
PLOTTED = json.dumps(PLOT[1])
END = "<|end|><|start|>assistant"

# Format -> (an answer, the text it holds, the calls).
WELL_FORMED: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    (
        "hermes",
        f'Let me see.<tool_call>\n{{"name": "add", "arguments": {WRITTEN}}}\n</tool_call>\n'
        f'<tool_call>{{"arguments": {PLOTTED}, "name": "plot"}}</tool_call>Done.',
        "Let me see.Done.",
        [ADD, PLOT],
    ),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [NOW]),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "x\ny\tz"}}</tool_call>',
        "",
        [("add", {"a": 1, "b": "x\ny\tz"})],
    ),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": "{\\"b\\": \\"x\\ny\\"}"}</tool_call>',
        "",
        [("add", {"b": "x\ny"})],
    ),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [NOW]),
    (  # an argument that the tool does not declare, twice
        "hermes",
        '<tool_call>{"name": "now", "arguments": {"x": 1, "y": 2, "x": [3]}}</tool_call>',
        "",
        [("now", {"x": 1, "y": 2})],
    ),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("add", {"a": 1})],
    ),
    (
        "llama3_json",
        f'\n{{"type": "function", "name": "add", "parameters": {WRITTEN}}}',
        "",
        [ADD],
    ),
    (
        "llama3_json",
        f'Well: <|python_tag|>{{"name": "add", "parameters": {WRITTEN}}}; '
        f'{{"name": "plot", "parameters": {PLOTTED}}}',
        "Well: ",
        [ADD, PLOT],
    ),
    (
        "llama3_json",
        '<|python_start|>I look.<|python_end|>{"name": "now", "parameters": {}}'
        f'{{"name": "add", "parameters": {WRITTEN}}}',
        "I look.",
        [NOW, ADD],
    ),
    (
        "llama3_json",
        '<|python_start|>{"name": "now", "parameters": {}}<|python_end|>Done.',
        "Done.",
        [NOW],
    ),
    ("llama3_json", "<|python_start|>1 < 2<|python_end|>", "1 < 2", []),
    ("llama3_json", '{"name": "now", "parameters": {}} is the call.', "is the call.", [NOW]),
    (
        "pythonic",
        "[add(a=1, b='x}\\\\\"{ é'), now(), plot(points=[[1, 2], {'x': [3.5]}], scale=.5,"
        " grid=true, title=None)]",
        "",
        [ADD, NOW, PLOT],
    ),
    (  # line ends as they are, and escaped
        "pythonic",
        """[add(a=1, b='say "it\\'s"\n\r\n\\n'), plot(points=[\n "x\n", {'y\n': 1}])]""",
        "",
        [
            ("add", {"a": 1, "b": 'say "it\'s"\n\r\n\n'}),
            ("plot", {"points": ["x\n", {"y\n": 1}]}),
        ],
    ),
    (
        "tool_code",
        '```tool_code\nadd(b="""x\n"y, (\'z""\n""", a=1)\nadd(b="x\n\ny", a=2)\n```',
        "",
        [("add", {"b": 'x\n"y, (\'z""\n', "a": 1}), ("add", {"b": "x\n\ny", "a": 2})],
    ),
    ("pythonic", "[add(a=1,\n b='x',\n), now(), ]", "", [("add", {"a": 1, "b": "x"}), NOW]),
    (  # an escape that is none
        "pythonic",
        r"[add(b='C:\Users\\N\x41 \u00e9 \uno', a=1)]",
        "",
        [("add", {"b": "C:\\Users\\NA é \\uno", "a": 1})],
    ),
    ("pythonic", "[now(größe=1, 名='x')]", "", [("now", {"größe": 1, "名": "x"})]),
    ("pythonic", "Sure: <|python_start|>[now()]<|python_end|>", "Sure: ", [NOW]),
    (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "add", "arguments": {WRITTEN}, "id": "abcdefghi"}}, '
        f'{{"name": "plot", "arguments": {PLOTTED}}}]',
        "",
        [ADD, PLOT],
    ),
    (
        "mistral",
        f"Yes.[TOOL_CALLS]add[ARGS]{WRITTEN}[TOOL_CALLS]plot[CALL_ID]a1b2[ARGS]{PLOTTED}",
        "Yes.",
        [ADD, PLOT],
    ),
    ("mistral", "[TOOL_CALLS]now{}", "", [NOW]),
    (
        "granite",
        f'Yes.<|tool_call|> [{{"name": "add", "arguments": {WRITTEN}}}, '
        f'{{"name": "plot", "arguments": {PLOTTED}}}]',
        "Yes.",
        [ADD, PLOT],
    ),
    (
        "phi4_mini",
        f'Yes.<|tool_call|>[{{"name": "add", "arguments": {WRITTEN}}}, '
        f'{{"name": "plot", "arguments": {PLOTTED}}}]<|/tool_call|>',
        "Yes.",
        [ADD, PLOT],
    ),
    (
        "phi4_mini",
        f'<|tool_call|>{{"name": "now"}}<|/tool_call|><|tool_call|>{{"name": "add", "arguments": '
        f"{WRITTEN}}}",
        "",
        [NOW, ADD],
    ),
    ("phi4_mini", ' functools[{"name": "now", "arguments": {}}]', " ", [NOW]),
    (
        "cohere",
        f'Yes.<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "add", "parameters": '
        f'{WRITTEN}}},\n    {{"tool_call_id": "1", "tool_name": "plot", "parameters": {PLOTTED}}}\n'
        "]<|END_ACTION|>",
        "Yes.",
        [ADD, PLOT],
    ),
    ("cohere", '<|START_ACTION|>[{"tool_name": "now", "parameters": {}}', "", [NOW]),
    ("tool_code", "[add(a=1, b='x}\\\\\"{ é'), now()]", "", [ADD, NOW]),
    (
        "tool_code",
        "I look.\n```tool_code\nnow()\nplot(points=[[1, 2], {'x': [3.5]}], scale=0.5, grid=True,"
        " title=None)\n```\n",
        "I look.\n",
        [NOW, PLOT],
    ),
    ("tool_code", "```tool_code\n[now(), now()]\n```", "", [NOW, NOW]),
    ("glm4", f"add\n{WRITTEN}", "", [ADD]),
    ("glm4", f"\nnow\n{{}}\nplot\n{PLOTTED}\n", "", [NOW, PLOT]),
    ("glm4", "now\n{}\nThat is it.", "That is it.", [NOW]),
    (
        "harmony",
        f"<|channel|>commentary<|message|>I look.{END} to=functions.add<|channel|>commentary "
        f"<|constrain|>json<|message|>{WRITTEN}<|call|>",
        "I look.",
        [ADD],
    ),
    (
        "harmony",
        f"<|channel|>commentary to=functions.plot json<|message|>{PLOTTED}<|call|><|start|>"
        "assistant<|channel|>commentary to=functions.now<|message|>{}",
        "",
        [PLOT, NOW],
    ),
    (  # the recipient first, right behind the prompt's `<|start|>assistant`
        "harmony",
        f" to=functions.add<|channel|>commentary json<|message|>{WRITTEN}<|call|>",
        "",
        [ADD],
    ),
    ("harmony", " to=functions", " to=functions", []),
    ("harmony", "\n<|channel|>final<|message|>Hi", "Hi", []),
    (
        "harmony",  # a text that speaks of a head
        "<|channel|>final<|message|>In Harmony <|channel|>analysis marks reasoning. More.",
        "In Harmony <|channel|>analysis marks reasoning. More.",
        [],
    ),
    ("harmony", "to=functions.add is how it calls.", "to=functions.add is how it calls.", []),
]

# Format, and an answer that is text as a whole.
MALFORMED = [
    (  # which declares a tool, and calls none
        "llama3_json",
        '{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}',
    ),
    ("hermes", "no call"),
    ("hermes", "a < b <tool"),
    ("hermes", "<tool_call>not json</tool_call>"),
    ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
    ("hermes", '<tool_call>{"name": 3}</tool_call>'),
    ("hermes", '<tool_call>{"nam'),
    ("hermes", '<tool_call>{"name": "rm", "arguments": {"a": 1}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1,}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1, "a": 2}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": one}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": ["\n", 1e999]}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1e999}"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": "a, b"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}} and so on'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}'),
    ("hermes", '<tool_call>{"name": "ad<tool'),
    ("llama3_json", '{"city": "Paris", "name": "add"}'),
    ("llama3_json", '{"name": "Ann", "parameters": {}}'),
    ("llama3_json", '{"name": "add", "parameters": 3}'),
    ("llama3_json", 'The call is {"name": "now", "parameters": {}}'),
    ("llama3_json", '<|python_tag|>brave.call(query="x")'),
    ("pythonic", "[add](http://example.org)"),
    ("pythonic", "[1, 2, 3]"),
    ("pythonic", "[rm(a=1)]"),
    ("pythonic", "[add(1)]"),
    ("pythonic", "[add(a=b)]"),
    ("pythonic", "[add(a={1})]"),
    ("pythonic", "[add(a=1e999)]"),
    ("pythonic", "[add(a=[1)]"),
    ("pythonic", "[add(,)]"),
    ("pythonic", "[,]"),
    ("pythonic", "[add(a='x"),
    ("pythonic", "Use [now()]"),
    ("mistral", "[TOOL_CALLS]rm[ARGS]{}"),
    ("mistral", '[TOOL_CALLS][{"name": "rm"}]'),
    ("mistral", "[TOOL_CALLS]add[ARGS][1]"),
    ("mistral", "[TOOL_CALLS]add and multiply"),
    ("mistral", "[TOOL_CAL"),
    ("granite", '<|tool_call|>[{"name": "rm"}]'),
    ("granite", "<|tool_call|>none"),
    ("phi4_mini", '<|tool_call|>[{"name": "rm"}]<|/tool_call|>'),
    ("phi4_mini", '<|tool_call|>{"name": "now"} or so<|/tool_call|>'),
    ("phi4_mini", "functools[cache] and functools.cache"),
    ("cohere", '<|START_ACTION|>[{"tool_name": "rm", "parameters": {}}]<|END_ACTION|>'),
    ("cohere", '<|START_ACTION|>{"tool_name": "now"}<|END_ACTION|>'),
    ("tool_code", "```tool_code\nprint(1)\n```"),
    ("tool_code", "now()"),
    ("glm4", "add"),
    ("glm4", "now\nand then"),
    ("glm4", "rm\n{}"),
    ("glm4", "now\n[1]"),
    ("glm4", 'add\n{"a": one}'),
    ("glm4", "I call\nnow\n{}"),
]
