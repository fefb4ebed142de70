"""More of `answers`: formats that have each argument between tags."""

from __future__ import annotations

from typing import Any

from tests.app.text.output.answers import ADD, NOW, PLOT

WELL_FORMED_BETWEEN_TAGS: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    (
        "qwen3_coder",
        "I look.\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n"
        f"{ADD[1]['b']}\n</parameter>\n</function>\n</tool_call>\n<tool_call><function=now>"
        "</function></tool_call>",
        "I look.\n",
        [ADD, NOW],
    ),
    (
        "qwen3_coder",
        "<function=plot>\n<parameter=points>\n"
        '[[1, 2], {"x": [3.5]}]\n</parameter>\n<parameter=scale>0.5</parameter>\n'
        "<parameter=grid>True</parameter><parameter=title>null</parameter></function></tool_call>",
        "",
        [PLOT],
    ),
    ("qwen3_coder", "<tool_call><function=now></function> and more", "and more", [NOW]),
    ("qwen3_coder", "<tool_call><function=now></tool_call> and more", " and more", [NOW]),
    (  # values of other types than the tool declares
        "qwen3_coder",
        "<function=add><parameter=a>one</parameter></function>"
        "<function=plot><parameter=grid>1</parameter><parameter=points>no</parameter></function>",
        "",
        [("add", {"a": "one"}), ("plot", {"grid": "1", "points": "no"})],
    ),
    (
        "qwen3_coder",
        '<function=plot><parameter=points>["x\ny"]</parameter></function>',
        "",
        [("plot", {"points": ["x\ny"]})],
    ),
    (  # the end of a value within a text of JSON
        "qwen3_coder",
        '<function=plot><parameter=points>["</parameter>\\"</parameter>", "x"]</parameter>'
        "<parameter=style>[</parameter></function>",
        "",
        [("plot", {"points": ['</parameter>"</parameter>', "x"], "style": "["})],
    ),
    (  # and where it is none
        "qwen3_coder",
        '<function=plot><parameter=points>["x</parameter><parameter=title>y"</parameter>'
        "</function><function=plot><parameter=points>['\"]</parameter></function>",
        "",
        [("plot", {"points": '["x', "title": 'y"'}), ("plot", {"points": "['\"]"})],
    ),
    (
        "glm45",
        "I look.\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
        f"<arg_key>b</arg_key>\n<arg_value>{ADD[1]['b']}</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        "I look.\n",
        [ADD, NOW],
    ),
    (
        "glm45",
        "<tool_call>plot<arg_key>points</arg_key><arg_value>"
        '[[1, 2], {"x": [3.5]}]</arg_value><arg_key>scale</arg_key><arg_value> 0.5\n</arg_value>'
        "<arg_key>grid</arg_key><arg_value>true</arg_value><arg_key>title</arg_key><arg_value>null"
        "</arg_value></tool_call><tool_call>now</tool_call>Done.",
        "Done.",
        [PLOT, NOW],
    ),
    (  # a text is kept as it is, also what looks like a tag
        "glm45",
        "<tool_call>add<arg_key>b</arg_key><arg_value>\n</tool_call>\n</arg_value></tool_call>",
        "",
        [("add", {"b": "\n</tool_call>\n"})],
    ),
]

MALFORMED_BETWEEN_TAGS = [
    ("qwen3_coder", "<tool_call>\n<function=rm>\n</function>\n</tool_call>"),
    ("qwen3_coder", "<tool_call>{}</tool_call>"),
    ("qwen3_coder", "<function=add>1</function>"),
    ("glm45", "<tool_call>rm\n</tool_call>"),
    ("glm45", '<tool_call>{"name": "now"}</tool_call>'),
    ("glm45", "<tool_call>add<arg_key>a</arg_key>1</tool_call>"),
    ("glm45", "<tool_call>now and then</tool_call>"),
]
