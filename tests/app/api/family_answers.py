"""Two parallel calls as each family's model writes them, behind reasoning where it reasons."""

from __future__ import annotations

import json

from app.text.output.registry import choose_formats
from tests.app.text import families_by_name as by_name

NUMBERS = (11_111_111_111, 22_222_222_222)  # longer than an id, which is random
ARGUMENTS = [json.dumps({"a": a, "b": "xy"}) for a in NUMBERS]
OBJECTS = [f'{{"name": "add", "arguments": {one}}}' for one in ARGUMENTS]
HERMES = "".join(f"<tool_call>{one}</tool_call>" for one in OBJECTS)
PYTHON = ", ".join(f"add(a={a}, b='xy')" for a in NUMBERS)
TEKKEN = [f"[ARGS]{one}" for one in ARGUMENTS]
CODER = "".join(
    f"<tool_call>\n<function=add>\n<parameter=a>\n{a}\n</parameter>\n<parameter=b>\nxy\n"
    "</parameter>\n</function>\n</tool_call>"
    for a in NUMBERS
)
GLM_45 = "".join(
    f"\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>{a}</arg_value>\n"
    "<arg_key>b</arg_key>\n<arg_value>xy</arg_value>\n</tool_call>"
    for a in NUMBERS
)
HARMONY = "<|start|>assistant".join(
    f"<|channel|>commentary to=functions.add <|constrain|>json<|message|>{one}<|call|>"
    for one in ARGUMENTS
)
# Family -> two parallel calls as its model writes them.
ANSWERS = {
    "hermes": HERMES,
    "gemma_3": f"[{PYTHON}]",
    "granite_3": f"<|tool_call|>[{', '.join(OBJECTS)}]",
    "granite_4": HERMES,
    "command_r7b": "<|START_THINKING|>Two of them.<|END_THINKING|><|START_ACTION|>[\n    "
    + ",\n    ".join(
        f'{{"tool_call_id": "{number}", "tool_name": "add", "parameters": {one}}}'
        for number, one in enumerate(ARGUMENTS)
    )
    + "\n]<|END_ACTION|>",
    "phi_4_mini": f"<|tool_call|>[{', '.join(OBJECTS)}]<|/tool_call|>",
    "r1": "Two of them.\n</think>\n\n<｜tool▁calls▁begin｜>"
    + "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{a}\n```<｜tool▁call▁end｜>"
        for a in ARGUMENTS
    )
    + "<｜tool▁calls▁end｜>",
    "qwen3": f"<think>\nTwo of them.\n</think>\n\n{HERMES}",
    "qwen3_coder": CODER,
    "glm_45": f"\n<think>Two of them.</think>{GLM_45}",
    "glm_4": "\n".join(f"add\n{one}" for one in ARGUMENTS),
    "llama_3": "; ".join(one.replace("arguments", "parameters", 1) for one in OBJECTS),
    "llama_3_2": f"[{PYTHON}]",
    "llama_4": f"<|python_start|>[{PYTHON}]<|python_end|>",
    "llama_4_json": "<|python_start|><|python_end|>"
    + "".join(one.replace("arguments", "parameters", 1) for one in OBJECTS),
    "mistral": f"[TOOL_CALLS] [{', '.join(OBJECTS)}]",
    "mistral_2506": "".join(
        f"[TOOL_CALLS]add[CALL_ID]abcdefgh{number}{one}" for number, one in enumerate(TEKKEN)
    ),
    "magistral": "[THINK]Two of them.[/THINK]" + "".join(f"[TOOL_CALLS]add{a}" for a in TEKKEN),
    "deepseek_v31": "<｜tool▁calls▁begin｜>"
    + "".join(f"<｜tool▁call▁begin｜>add<｜tool▁sep｜>{a}<｜tool▁call▁end｜>" for a in ARGUMENTS)
    + "<｜tool▁calls▁end｜>",
    "gemma_4": "<|channel>thought\nTwo of them.\n<channel|>"
    + "".join(f'<|tool_call>call:add{{a:{a},b:<|"|>xy<|"|>}}<tool_call|>' for a in NUMBERS),
    "minimax_m2": "Two of them.\n</think>\n\n<minimax:tool_call>\n"
    + "".join(
        f'<invoke name="add">\n<parameter name="a">{a}</parameter>\n<parameter name="b">xy'
        "</parameter>\n</invoke>\n"
        for a in NUMBERS
    )
    + "</minimax:tool_call>",
    "seed_oss": "<seed:think>Two of them.</seed:think>"
    + "".join(
        f"\n<seed:tool_call>\n<function=add>\n<parameter=a>{a}</parameter>\n"
        "<parameter=b>xy</parameter>\n</function>\n</seed:tool_call>"
        for a in NUMBERS
    ),
    "gpt_oss": "<|channel|>analysis<|message|>Two of them.<|end|><|start|>assistant" + HARMONY,
}
# As they write calls themselves, which their own tests compare with texts.
THOUGHTS = {
    "apertus": "<|inner_prefix|>Two of them.<|inner_suffix|>",
    "longcat": "<longcat_think>Two of them.</longcat_think>",
    "minicpm5": "<think>\nTwo of them.\n</think>\n",
    "step3": "Two of them.\n</think>\n",
    "hunyuan_v3_open": "Two of them.</think:opensource>",
    "kimi_k3": "Two of them.<|close|>think<|sep|>",
    "plamo3": "<|plamo:begin_think:plamo|>Two of them.<|plamo:end_think:plamo|>",
    "solar_open": "<|think|>Two of them.<|end|><|begin|>assistant",
}
for family, template in by_name.FAMILIES.items():
    tools = choose_formats([template]).tools
    assert tools is not None
    calls = tools.written([("add", {"a": a, "b": "xy"}) for a in NUMBERS])
    ANSWERS[family] = f"{THOUGHTS.get(family, '')}{calls}"
THINKS = frozenset(
    {*THOUGHTS, "command_r7b", "gemma_4", "glm_45", "gpt_oss", "magistral", "minimax_m2", "qwen3"}
    | {"r1", "seed_oss"}
)
