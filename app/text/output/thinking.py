"""Reasoning between two tags at the start of an answer."""

from __future__ import annotations

from typing import ClassVar

from app.text.output.interface import ReasoningFormat
from app.text.output.pieces import AnswerPart, AnswerPieces
from app.text.output.source import Reading, Source


class Think(ReasoningFormat):
    """Qwen3, DeepSeek-R1, SmolLM3, GLM-4.5 and many others.

    frame: marks around the answer that are left out, where the first follows the reasoning and the
    second ends the answer or precedes a call.
    """

    opening: ClassVar[str] = "<think>"
    closing: ClassVar[str] = "</think>"
    frame: ClassVar[tuple[str, str] | None] = None
    recognized_by: ClassVar[tuple[str, ...]] = ("<think>", "</think>")
    special_tokens: ClassVar[tuple[str, ...]] = ("<think>", "</think>")

    def read(self, source: Source, out: AnswerPieces) -> Reading[None]:
        start = source.at
        yield from source.blanks()
        if not (yield from source.accept(self.opening)):  # some write the prompt's once more
            source.at = start
            if out.part is not AnswerPart.REASONING:
                out.part = AnswerPart.ANSWER
                return
        out.part = AnswerPart.REASONING
        yield from source.shown_until((self.closing,), out.reasoning)
        out.end_reasoning()
        if (yield from source.accept(self.closing)):
            yield from source.blanks()
            if self.frame is not None and (yield from source.accept(self.frame[0])):
                source.frame_ends = self.frame[1:]

    @classmethod
    def begins_in(cls, prompt: str) -> bool:
        return prompt.rstrip().endswith(cls.opening)

    @classmethod
    def marks(cls, prompt: str) -> tuple[str, ...]:
        return () if prompt.rstrip().endswith(cls.closing) else (cls.opening, cls.closing)


class GraniteThink(Think):
    """Granite 3.3."""

    frame = ("<response>", "</response>")
    recognized_by = ("<response></response>",)

    @classmethod
    def marks(cls, prompt: str) -> tuple[str, ...]:
        """The prompt asks for them where the model is to reason."""
        return super().marks(prompt) if cls.opening in prompt else ()


class MistralThink(Think):
    """Magistral."""

    opening = "[THINK]"
    closing = "[/THINK]"
    recognized_by = ("[THINK]",)
    special_tokens = ("[THINK]", "[/THINK]")
