"""Tiny models of two layers, enough for two stages and for every kind of layer: the interpreter
takes most of a test's time for each."""

from __future__ import annotations

from tests.actors.stage import greedy_reference

LAYERS = 2


def expected(variant: str, lengths: tuple[int, ...] = greedy_reference.LENGTHS) -> list[list[int]]:
    """What transformers generates with them."""
    return greedy_reference.expected(variant, lengths, num_hidden_layers=LAYERS)
