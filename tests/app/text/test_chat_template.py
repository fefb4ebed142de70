from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from app.text.chat_template import (
    ChatTemplate,
    ConversationInvalid,
    TemplateBroken,
    TemplateBusy,
    TemplateHostile,
    TemplateMissing,
)
from app.text.processor import TextProcessor
from app.text.worker import KillableWorker

HELLO = [{"role": "user", "content": "Hello"}]


def render(source: str, limit_s: float = 0.5) -> str:
    template = ChatTemplate({"default": source}, {"bos_token": "<s>"}, limit_s=limit_s)
    try:
        return template.render(HELLO)
    finally:
        template.close()


def until_not_busy(render_once: Callable[[], str]) -> str:
    """A machine that does other work may give the child no processor, which is not its fault."""
    while True:
        try:
            return render_once()
        except TemplateBusy:
            continue


async def test_conversation_becomes_tokens(byte_level: TextProcessor) -> None:
    text = await byte_level.render_chat([*HELLO, {"role": "assistant", "content": "Hi"}])
    assert text == "<|user|>Hello<|end|><|assistant|>Hi<|end|><|assistant|>"
    tokens = await byte_level.encode(await byte_level.render_chat(HELLO), add_special_tokens=False)
    assert byte_level.decode(tokens, skip_special_tokens=False) == (
        "<|user|>Hello<|end|><|assistant|>"
    )


def test_special_tokens_and_helpers() -> None:
    assert render("{{ bos_token }}{{ messages | tojson }}") == (
        '<s>[{"role": "user", "content": "Hello"}]'
    )
    assert render("{% generation %}x{% endgeneration %}") == "x"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages | tojson(separators=(',', ':')) }}",
        "{{ {'b': '猫', 'a': 1} | tojson(true, 2, (',', ': '), true) }}",
        "{{ {'b': 2, 'a': 1} | tojson(sort_keys=True) }}",
        "{{ dict.fromkeys(['a', 'b'], 1) | tojson }}{{ dict(c=2).c }}",
        "{% set ns = namespace(found=[]) %}{% for m in messages %}"
        "{% set ns.found = ns.found + [m.role] %}{% break %}{% endfor %}{{ ns.found }}",
    ],
)
def test_what_templates_call_is_what_transformers_gives_them(source: str) -> None:
    ((theirs,), _) = render_jinja_template([HELLO], chat_template=source)
    assert until_not_busy(lambda: render(source, limit_s=10.0)) == theirs


def test_a_template_may_refuse_messages() -> None:
    with pytest.raises(ConversationInvalid, match="only two"):
        render("{{ raise_exception('only two') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10**10 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{% set ns = namespace(x='aaaaaaaa') %}"
        "{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{{ '%1000000000d' % 1 }}",
    ],
)
def test_hostile_templates_are_stopped(source: str) -> None:
    with pytest.raises((TemplateHostile, ConversationInvalid)):
        until_not_busy(lambda: render(source))


def test_a_new_child_serves_after_a_kill() -> None:
    endless = "{% if messages|length > 1 %}{{ 10 ** (10 ** (messages|length * 5)) }}{% endif %}ok"
    template = ChatTemplate({"default": endless}, {}, limit_s=0.3)
    with pytest.raises(TemplateHostile):
        until_not_busy(lambda: template.render(HELLO * 2))
    assert until_not_busy(lambda: template.render(HELLO)) == "ok"
    template.close()


def test_hostile_models_are_refused_at_the_start() -> None:
    template = ChatTemplate({"default": "{{ ''.__class__.__mro__ }}"}, {})
    with pytest.raises(TemplateHostile, match="sandbox"):
        template.check()
    template.close()


@pytest.mark.parametrize("source", ["{% if %}", "{{ messages | no_such_filter }}"])
def test_one_that_does_not_compile_is_told_from_one_that_objects(source: str) -> None:
    template = ChatTemplate({"default": source}, {})
    with pytest.raises(TemplateBroken, match=r"\(default\) does not compile: line 1: "):
        template.check()
    template.close()


def test_without_a_template() -> None:
    with pytest.raises(TemplateMissing):
        ChatTemplate({}, {}).render(HELLO)


def test_variables_never_shadow_the_messages() -> None:
    template = ChatTemplate({"default": "{{ messages|length }}{{ deep }}"}, {})
    assert template.render(HELLO, variables={"messages": [], "deep": 7}) == "17"
    template.close()


def test_which_variables_a_template_reads_is_looked_up_by_their_whole_names() -> None:
    """A name from a request is never compiled as a pattern, which takes seconds for a long one."""
    template = ChatTemplate(
        {"default": "said {{ deep - er }}{% if x == 'quoted' %}{{ x.field }}{% endif %}"}, {}
    )
    assert [name for name in ("deep", "er", "x") if template.reads(name)] == ["deep", "er", "x"]
    for name in ("", "dee", "said", "quoted", "field", "deep - er", "deep" * (1 << 18)):
        assert not template.reads(name)


def test_the_values_of_a_variable_stand_beside_it() -> None:
    source = (
        "{% set effort = effort | default('high') %}"
        "{% if effort in [\"low\", 'minimal'] %}low{% endif %}"
        "{{ 'effort' + m.effort + 'max' }} effort {% if x == 'none' %}{% endif %}"
    )
    template = ChatTemplate({"default": source}, {})
    assert template.beside("effort") == {"high", "low", "minimal"}
    assert template.beside("thinking") == frozenset()


def test_a_renderer_that_gets_no_processor_says_nothing_about_the_template(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of its children is stopped as soon as it is ready: the template is not hostile."""
    template = ChatTemplate({"default": "x"}, {}, limit_s=0.2)
    ready = KillableWorker._ready_child

    def stopped(worker: KillableWorker) -> subprocess.Popen[bytes]:
        child = ready(worker)
        child.send_signal(signal.SIGSTOP)
        return child

    monkeypatch.setattr(KillableWorker, "_ready_child", stopped)
    try:
        with pytest.raises(TemplateBusy, match="no processor"):
            template.render(HELLO)
    finally:
        template.close()
