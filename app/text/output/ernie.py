"""ERNIE 4.5: `<think>`, then the answer in `<response>`; calls as Hermes writes them."""

from __future__ import annotations

from app.text.output.hunyuan import HunyuanThink


class ErnieThink(HunyuanThink):
    """The thinking models; others of the family have no reasoning."""

    recognized_by = ("think_mode=",)
    around = ("<response>", "</response>")
    special_tokens = ("<think>", "</think>", *around)
    heads = ("<response>\n", "")
    tail = "\n</response>"
