"""Formats are told by the chat template, or named."""

from __future__ import annotations

from typing import get_args

import pytest

from app.settings.schema import ModelSettings
from app.text.output.harmony import Harmony, HarmonyChannels
from app.text.output.hermes import Hermes
from app.text.output.mistral import Mistral
from app.text.output.registry import (
    AUTO,
    NONE,
    REASONING_FORMATS,
    TOOL_FORMATS,
    choose_formats,
)
from app.text.output.thinking import Think
from tests.app.text.families import FAMILIES, GPT_OSS, MISTRAL

FORMATS_OF = {
    "apertus": ("apertus", "apertus"),
    "deepseek_v32": ("deepseek_v32", "think"),
    "deepseek_v4": ("deepseek_v4", "think"),
    "functionary": ("functionary", None),
    "functiongemma": ("functiongemma", None),
    "gigachat3": ("gigachat3", None),
    "internlm": ("internlm", None),
    "deepseek_v31": ("deepseek_v31", "think"),
    "minimax_m2": ("minimax_m2", "think"),
    "seed_oss": ("seed_oss", "seed_oss"),
    "hermes": ("hermes", None),
    "dots": ("dots", None),
    "step3": ("step3", "think"),
    "hunyuan_v3_open": ("hunyuan_v3_open", "hunyuan_v3_open"),
    "kimi_k3": ("kimi_k3", "kimi_k3"),
    "plamo3": ("plamo3", "plamo3"),
    "granite_20b": ("granite_20b", None),
    "minicpm5": ("minicpm5", "think"),
    "longcat": ("longcat", "longcat"),
    "xlam": ("xlam", None),
    "solar_open": ("solar_open", "solar_open"),
    "qwen3": ("hermes", "think"),
    "qwen3_coder": ("qwen3_coder", None),
    "glm_45": ("glm45", "think"),
    "glm_4": ("glm4", None),
    "r1": ("deepseek_v3", "think"),
    "llama_3": ("llama3_json", None),
    "llama_3_2": ("pythonic", None),
    "llama_4": ("pythonic", None),
    "llama_4_json": ("llama3_json", None),
    "mistral": ("mistral", None),
    "mistral_2506": ("mistral", None),
    "magistral": ("mistral", "mistral"),
    "gpt_oss": ("harmony", "harmony"),
    "gemma_3": ("tool_code", None),
    "gemma_4": ("gemma4", "gemma4"),
    "command_r7b": ("cohere", "cohere"),
    "phi_4_mini": ("phi4_mini", None),
    "granite_3": ("granite", "granite"),
    "granite_4": ("hermes", None),
}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_template_shows_its_formats(family: str) -> None:
    tools, reasoning = FORMATS_OF[family]
    found = choose_formats([FAMILIES[family]])
    assert found.tools is TOOL_FORMATS[tools]
    assert found.reasoning is (None if reasoning is None else REASONING_FORMATS[reasoning])


def test_a_template_that_shows_nothing_is_read_like_hermes() -> None:
    for templates in ([], ["{{ messages }}"]):
        found = choose_formats(templates)
        assert (found.tools, found.reasoning) == (Hermes, None)


def test_a_named_format_counts_more_than_the_template() -> None:
    found = choose_formats([MISTRAL], "hermes", "think")
    assert (found.tools, found.reasoning) == (Hermes, Think)
    assert choose_formats([MISTRAL], "none").tools is None
    assert choose_formats([MISTRAL], "auto", "think").tools is Mistral


def test_harmony_holds_both() -> None:
    assert choose_formats([], "harmony").reasoning is HarmonyChannels
    assert choose_formats([], "auto", "harmony").tools is Harmony
    assert choose_formats([], "none", "harmony").tools is None
    assert choose_formats([GPT_OSS], "auto", "none").tools is None
    for tools, reasoning in (("hermes", "harmony"), ("harmony", "think"), ("harmony", "none")):
        with pytest.raises(ValueError, match=r"model\.reasoning_parser: harmony"):
            choose_formats([], tools, reasoning)


@pytest.mark.parametrize("setting", ["model.tool_parser", "model.reasoning_parser"])
def test_an_unknown_name_is_refused(setting: str) -> None:
    given = {setting.removeprefix("model."): "nope"}
    with pytest.raises(ValueError, match=f"{setting}: unknown 'nope'; known: "):
        choose_formats([], **given)


def test_the_settings_know_every_format() -> None:
    fields = ModelSettings.model_fields
    assert sorted(get_args(fields["tool_parser"].annotation)) == sorted([AUTO, NONE, *TOOL_FORMATS])
    assert sorted(get_args(fields["reasoning_parser"].annotation)) == sorted(
        [AUTO, NONE, *REASONING_FORMATS]
    )
