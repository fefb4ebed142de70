"""As many of a conversation's last turns as there is room for, found in few looks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from app.api.endpoints.conversation import Prompt
from app.api.endpoints.truncation import longest_that_fits, turns
from app.api.http.errors import ApiError, invalid
from app.api.schema.chat import Message


def said(*roles: str) -> list[Message]:
    return [
        Message(role=role, content=f"{role} {number}")  # type: ignore[arg-type]
        for number, role in enumerate(roles)
    ]


def test_a_turn_begins_with_a_users_message_and_instructions_stay() -> None:
    messages = said("system", "assistant", "user", "assistant", "tool", "system", "user")
    assert turns(messages) == [messages, [messages[0], *messages[2:]], [messages[0], messages[6]]]
    assert turns(said("user")) == [said("user")]
    assert turns(said("system")) == [said("system")]


@pytest.mark.parametrize("most", range(13))
@pytest.mark.parametrize("is_told", [True, False])
async def test_the_longest_that_fits_is_found(most: int, is_told: bool) -> None:
    """A conversation far too long is refused before it has tokens."""
    messages, looks = said(*["user"] * 10), []

    async def render(given: Sequence[Message]) -> Prompt:
        looks.append(len(given))
        if is_told and len(given) > most:
            raise invalid("too long", "messages", "context_length_exceeded")
        return Prompt("", list(range(len(given))))

    if is_told and not most:
        with pytest.raises(ApiError, match="too long"):
            await longest_that_fits(messages, render, most)
        return
    prompt = await longest_that_fits(messages, render, most)
    assert len(prompt.tokens) == max(1, min(10, most))
    assert len(looks) <= 6
    assert most < 10 or looks == [10]


async def test_other_errors_are_not_taken_for_length() -> None:
    async def render(given: Sequence[Message]) -> Prompt:
        raise invalid("no such role", "messages", "invalid_messages")

    with pytest.raises(ApiError, match="no such role"):
        await longest_that_fits(said("user", "user"), render, 5)
