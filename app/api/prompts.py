"""The four ways of giving prompts: a text, token ids, and lists of either."""

from __future__ import annotations

from collections.abc import Sequence

from app.api.context import Context
from app.api.http.errors import invalid

GivenPrompts = str | list[int] | list[str] | list[list[int]]


def as_list(given: GivenPrompts, param: str, limit: int) -> list[str | list[int]]:
    """Every prompt by itself; raises 400 for none or too many."""
    prompts: list[str | list[int]]
    if isinstance(given, str):
        prompts = [given]
    elif given and isinstance(given[0], int):
        prompts = [[token for token in given if isinstance(token, int)]]
    else:
        prompts = [prompt for prompt in given if not isinstance(prompt, int)]
    if not prompts:
        raise invalid(f"'{param}' is empty.", param, "empty_prompt")
    if len(prompts) > limit:
        raise invalid(f"At most {limit} prompts are allowed.", param)
    return prompts


async def tokenized(
    prompts: Sequence[str | list[int]], context: Context, param: str
) -> list[list[int]]:
    """Token ids of every prompt, checked against the model's vocabulary and context."""
    found: list[list[int]] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            context.check_length(prompt, param)
            tokens = await context.text.encode(prompt)
        else:
            tokens = prompt
        context.check_prompt(tokens, param)
        found.append(tokens)
    return found
