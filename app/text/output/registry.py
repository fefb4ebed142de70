"""Formats by name, in the order in which they are matched against a chat template.

A new format is one class and one row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Final, TypeVar

from app.text.output.apertus import Apertus, ApertusThink
from app.text.output.cohere import Cohere, CohereThink
from app.text.output.deepseek import DeepSeekV3, DeepSeekV31
from app.text.output.ernie import ErnieThink
from app.text.output.forced import Forced
from app.text.output.functionary import Functionary
from app.text.output.gemma4 import FunctionGemma, Gemma4, Gemma4Think
from app.text.output.gigachat3 import GigaChat3
from app.text.output.glm import Glm4, Glm45, LongCat, LongCatThink
from app.text.output.granite import Granite, Granite20b, Phi4Mini
from app.text.output.harmony import Harmony, HarmonyChannels
from app.text.output.hermes import Hermes
from app.text.output.hunyuan import Hunyuan, HunyuanThink, MiniMaxM1
from app.text.output.hunyuan_v3 import HunyuanV3, HunyuanV3Open, HunyuanV3Think
from app.text.output.interface import Format, ReasoningFormat, ToolFormat
from app.text.output.internlm import InternLM
from app.text.output.kimi_k2 import KimiK2
from app.text.output.kimi_k3 import KimiK3, KimiK3Think
from app.text.output.lfm2 import Lfm2, MiniCPM3, MiniCPM3Think
from app.text.output.llama3_json import Llama3Json
from app.text.output.minimax_m2 import DeepSeekV4, DeepSeekV32, Dots, MiniCPM5, MiniMaxM2
from app.text.output.mistral import Mistral
from app.text.output.nemotron import Nemotron
from app.text.output.olmo3 import Olmo3
from app.text.output.parser import OutputParser
from app.text.output.pieces import Tools
from app.text.output.plamo3 import Plamo3, Plamo3Think
from app.text.output.pythonic import Pythonic, ToolCode
from app.text.output.qwen3_coder import Qwen3Coder
from app.text.output.seed_oss import SeedOss, SeedThink
from app.text.output.solar_open import SolarOpen, SolarThink
from app.text.output.step3 import Step3
from app.text.output.thinking import GraniteThink, MistralThink, Think
from app.text.output.xlam import XLam

TOOL_FORMATS: Final[Mapping[str, type[ToolFormat]]] = {
    "harmony": Harmony,
    "deepseek_v3": DeepSeekV3,
    "deepseek_v31": DeepSeekV31,
    "deepseek_v4": DeepSeekV4,
    "deepseek_v32": DeepSeekV32,
    "kimi_k2": KimiK2,
    "kimi_k3": KimiK3,
    "plamo3": Plamo3,
    "hunyuan_v3_open": HunyuanV3Open,
    "hunyuan_v3": HunyuanV3,
    "step3": Step3,
    "minimax_m2": MiniMaxM2,
    "dots": Dots,
    "minicpm5": MiniCPM5,
    "longcat": LongCat,
    "gemma4": Gemma4,
    "functiongemma": FunctionGemma,
    "apertus": Apertus,
    "gigachat3": GigaChat3,
    "internlm": InternLM,
    "seed_oss": SeedOss,
    "solar_open": SolarOpen,
    "minicpm3": MiniCPM3,
    "lfm2": Lfm2,
    "nemotron": Nemotron,
    "functionary": Functionary,
    "qwen3_coder": Qwen3Coder,
    "glm45": Glm45,
    "minimax_m1": MiniMaxM1,
    "hunyuan": Hunyuan,
    "phi4_mini": Phi4Mini,
    "granite": Granite,
    "granite_20b": Granite20b,
    "cohere": Cohere,
    "mistral": Mistral,
    "xlam": XLam,
    "olmo3": Olmo3,
    "pythonic": Pythonic,
    "hermes": Hermes,
    "llama3_json": Llama3Json,
    "glm4": Glm4,
    "tool_code": ToolCode,
}
REASONING_FORMATS: Final[Mapping[str, type[ReasoningFormat]]] = {
    "harmony": HarmonyChannels,
    "cohere": CohereThink,
    "gemma4": Gemma4Think,
    "plamo3": Plamo3Think,
    "kimi_k3": KimiK3Think,
    "hunyuan_v3_open": HunyuanV3Think,
    "apertus": ApertusThink,
    "longcat": LongCatThink,
    "granite": GraniteThink,
    "hunyuan": HunyuanThink,
    "ernie": ErnieThink,
    "mistral": MistralThink,
    "seed_oss": SeedThink,
    "solar_open": SolarThink,
    "minicpm3": MiniCPM3Think,
    "think": Think,
}
AUTO, NONE = "auto", "none"

_HARMONY: Final = (
    "model.reasoning_parser: harmony reads calls and reasoning together: name it for both "
    "parsers, or leave one on auto"
)
_Format = TypeVar("_Format", bound=Format)


@dataclass(frozen=True, slots=True)
class OutputFormats:
    """How a model writes tool calls and reasoning; None: not at all, or switched off."""

    tools: type[ToolFormat] | None
    reasoning: type[ReasoningFormat] | None

    def special_tokens(self, *, with_tools: bool) -> frozenset[str]:
        """Tokens kept in the text even if the tokenizer marks them as special."""
        formats: list[type[Format] | None] = [self.reasoning, self.tools if with_tools else None]
        return frozenset(
            token for one in formats if one is not None for token in one.special_tokens
        )

    def parser(
        self,
        tools: Tools,
        *,
        is_forced: bool,
        by_argument: bool,
        in_reasoning: bool,
        parallel: bool = True,
        custom: Set[str] = frozenset(),
    ) -> OutputParser:
        """A parser for one answer.

        is_forced: a grammar forces JSON calls. by_argument: send calls argument by argument, not
        once complete. in_reasoning: the prompt has opened the reasoning. parallel: calls after the
        first are kept, too. custom: names of tools whose calls have a text for arguments.
        """
        called = Forced if is_forced else self.tools
        return OutputParser(
            called() if tools and called is not None else None,
            None if self.reasoning is None else self.reasoning(),
            tools if called is not None else {},
            by_argument=by_argument,
            in_reasoning=in_reasoning,
            parallel=parallel,
            custom=custom,
        )


def choose_formats(
    templates: Iterable[str], tool_parser: str = AUTO, reasoning_parser: str = AUTO
) -> OutputFormats:
    """The named formats; `auto` picks the one that matches the chat templates.

    If no tool format matches, Hermes is assumed. Raises ValueError for an unknown name.
    """
    text = "\n".join(templates)
    tools = _choose("model.tool_parser", tool_parser, TOOL_FORMATS, text)
    reasoning = _choose("model.reasoning_parser", reasoning_parser, REASONING_FORMATS, text)
    if tools is None and tool_parser == AUTO:
        tools = Hermes
    if tools is Harmony and reasoning is not HarmonyChannels:
        if tool_parser == AUTO:  # and the reasoning format is not Harmony's
            tools = None
        elif reasoning_parser == AUTO:
            reasoning = HarmonyChannels
        else:
            raise ValueError(_HARMONY)
    elif reasoning is HarmonyChannels and tools is not Harmony:
        if tool_parser not in (AUTO, NONE):
            raise ValueError(_HARMONY)
        tools = Harmony if tool_parser == AUTO else None
    return OutputFormats(tools, reasoning)


def _choose(
    setting: str, name: str, known: Mapping[str, type[_Format]], template: str
) -> type[_Format] | None:
    if name in known:
        return known[name]
    if name == NONE:
        return None
    if name != AUTO:
        raise ValueError(f"{setting}: unknown {name!r}; known: {', '.join(sorted(known))}")
    return next((one for one in known.values() if one.is_of(template)), None)
