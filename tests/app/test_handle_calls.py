"""What a Python caller reads: the same text, with the same end, as a client of HTTP."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from actors.scheduling.request import FinishReason
from app.engine_client.client import EngineError, EngineUnavailable, ModelCard
from app.handle_calls import HandleCalls, ServedModel
from app.telemetry.live import Telemetry
from app.text.chat_template import ChatTemplate
from app.text.processor import TextProcessor
from app.text.worker import KillableWorker
from tests.app.api.hand_engine import HandEngine, logprobs_of
from tests.tiny_tokenizers import wordpiece_folder

THE, HOUSE, PLURAL, END = 6, 4, 5, 8


class Engine(HandEngine):
    """Continues "the house" by "s the house", ends there and would go on."""

    num_blocks = 100

    def __init__(self) -> None:
        super().__init__(ModelCard("tiny", "folder", 100, 13, (), 0))
        self.script = lambda request, index: [PLURAL, THE, HOUSE, END, THE][len(request.output) :]


class Calls(HandleCalls):
    def __init__(self, text: TextProcessor) -> None:
        self.engine = Engine()
        self.models = {"tiny": ServedModel(self.engine, text)}  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextProcessor]:
    """Its tokens do not decode on their own: a blank depends on the word before."""
    processor = TextProcessor(wordpiece_folder(Path(tmp_path_factory.mktemp("words"))))
    yield processor
    processor.close()


@pytest.mark.parametrize(
    ("output", "wanted"),
    [((), "s the house"), ((PLURAL,), " the house"), ((PLURAL, THE), " house")],
)
async def test_the_text_continues_the_prompt_and_what_was_delivered(
    text: TextProcessor, output: tuple[int, ...], wanted: str
) -> None:
    events = [event async for event in Calls(text).generate("the house", output=output)]
    assert "".join(event["text"] for event in events) == wanted


async def test_a_call_is_counted_as_a_request_is(text: TextProcessor) -> None:
    calls, telemetry = Calls(text), Telemetry("tiny")
    calls.telemetry = {"tiny": telemetry}

    def of(name: str, **labels: str) -> float | None:
        registry = telemetry.metrics_now().registry
        return registry.get_sample_value(f"legato_{name}", {"model_name": "tiny", **labels})

    async for _ in calls.generate("the house"):
        pass
    assert of("request_success_total", finished_reason="stop") == 1
    assert of("prompt_tokens_total") == 2
    assert of("generation_tokens_total") == 4
    assert of("time_to_first_token_seconds_count") == 1
    left = calls.generate("the house", max_tokens=9)
    await anext(left)
    await left.aclose()
    assert of("request_failure_total", status="200", reason="disconnect") == 1
    calls.engine.fail_at, calls.engine.failure = 1, EngineUnavailable("away")
    with pytest.raises(EngineUnavailable):
        async for _ in calls.generate("the house"):
            pass
    assert of("request_failure_total", status="503", reason="engine_unavailable") == 1


async def test_the_end_token_of_the_tokenizer_ends_the_answer(text: TextProcessor) -> None:
    """The model's config names none."""
    events = [event async for event in Calls(text).generate("the house")]
    assert events[-1]["tokens"] == [END]
    assert events[-1]["finish_reason"] is FinishReason.STOP
    events = [event async for event in Calls(text).generate("the house", ignore_eos=True)]
    assert events[-1]["tokens"] == [THE]


async def test_the_text_ends_before_a_stop_token_as_over_http(text: TextProcessor) -> None:
    events = [event async for event in Calls(text).generate("the house", stop_token_ids=[HOUSE])]
    assert [event["tokens"] for event in events] == [[PLURAL], [THE], [HOUSE]]
    assert "".join(event["text"] for event in events) == "s the"
    assert events[-1]["finish_reason"] is FinishReason.STOP


async def test_log_probabilities_come_where_they_are_asked_for(text: TextProcessor) -> None:
    events = [event async for event in Calls(text).generate("the house", logprobs=2)]
    assert [event["logprobs"] for event in events] == [
        [logprobs_of(token, 2)] for token in (PLURAL, THE, HOUSE, END)
    ]
    assert not any("prompt_logprobs" in event for event in events)
    events = [event async for event in Calls(text).generate("the house", prompt_logprobs=1)]
    of_prompt = [found for event in events for found in event["prompt_logprobs"]]
    assert of_prompt == [None, logprobs_of(HOUSE, 1)]
    assert not any("logprobs" in event for event in events)


async def test_ids_of_a_prompt_are_whole_numbers(text: TextProcessor) -> None:
    """The scheduler could not read others; NumPy's are taken as Python's."""
    calls = Calls(text)
    for ids in ([5.0] * 40, ["5"], [None]):
        with pytest.raises(ValueError, match="prompt: must be token ids"):
            await anext(calls.generate(ids))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="prompt: must be token ids"):
            await calls.embed(ids)  # type: ignore[arg-type]
    assert [event async for event in calls.generate(np.array([THE, HOUSE]))]  # type: ignore[arg-type]
    assert {type(token) for token in calls.engine.seen[0].prompt} == {int}


@pytest.mark.parametrize(
    ("templates", "kind", "said"),
    [
        ({}, ValueError, "messages: "),
        ({"default": "{{ raise_exception('only two') }}"}, ValueError, "messages: only two"),
        ({"default": "{% if %}"}, EngineError, "does not compile"),
    ],
)
async def test_messages_are_at_fault_only_where_the_template_says_so(
    text: TextProcessor,
    monkeypatch: pytest.MonkeyPatch,
    templates: Mapping[str, str],
    kind: type[Exception],
    said: str,
) -> None:
    template = ChatTemplate(templates, {}, limit_s=60)
    monkeypatch.setattr(text, "template", template)
    with pytest.raises(kind, match=said):
        await anext(Calls(text).chat([{"role": "user", "content": "the house"}]))
    template.close()


async def test_messages_come_in_any_series_and_else_are_refused_by_name(
    text: TextProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray Data hands over a column of lists as arrays."""
    template = ChatTemplate(
        {"default": "{% for m in messages %}{{ m.content }} {% endfor %}"}, {}, limit_s=60
    )
    monkeypatch.setattr(text, "template", template)
    calls = Calls(text)
    turns = [{"role": "user", "content": "the house"}, {"role": "user", "content": "the"}]
    for series in (turns, tuple(turns), iter(turns), np.array(turns)):
        await anext(calls.chat(series))  # type: ignore[arg-type]
    assert {sent.prompt for sent in calls.engine.seen} == {(THE, HOUSE, THE)}
    wrong = ("the house", turns[0], ["the house"], None, 7, [{"role": "user", "content": b"the"}])
    for messages in wrong:
        with pytest.raises(ValueError, match=r"^messages: "):
            await anext(calls.chat(messages))  # type: ignore[arg-type]
    template.close()


async def test_a_renderer_without_a_processor_is_worth_another_try(
    text: TextProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = ChatTemplate({"default": "x"}, {}, limit_s=0.2)
    ready = KillableWorker._ready_child

    def stopped(worker: KillableWorker) -> subprocess.Popen[bytes]:
        child = ready(worker)
        child.send_signal(signal.SIGSTOP)
        return child

    monkeypatch.setattr(text, "template", template)
    monkeypatch.setattr(KillableWorker, "_ready_child", stopped)
    with pytest.raises(EngineUnavailable, match="no processor"):
        await anext(Calls(text).chat([{"role": "user", "content": "the house"}]))
    template.close()
