"""`truncation: auto` of /v1/responses: a conversation that is too long loses its oldest turns."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from app.api.endpoints.conversation import Prompt
from app.api.http.errors import ApiError
from app.api.schema.chat import Message

_LEADING = ("system", "developer")


def turns(messages: Sequence[Message]) -> list[list[Message]]:
    """The conversation whole, and with ever fewer of its turns, the last one at least. A turn
    begins with a user's message, as templates expect; what instructs the model stays."""
    num_leading = 0
    while num_leading < len(messages) and messages[num_leading].role in _LEADING:
        num_leading += 1
    leading, rest = list(messages[:num_leading]), list(messages[num_leading:])
    later = [number for number, message in enumerate(rest) if number and message.role == "user"]
    return [leading + rest[start:] for start in (0, *later)]


async def longest_that_fits(
    messages: Sequence[Message],
    render: Callable[[Sequence[Message]], Awaitable[Prompt]],
    most_tokens: int,
) -> Prompt:
    """The prompt of as many turns as `most_tokens` hold; of the last one alone where it is too long
    as well, for the caller to refuse. Raises as `render` does."""
    candidates = turns(messages)
    low, middle, high = 0, 0, len(candidates) - 1  # most conversations fit whole
    while low < high:
        try:
            prompt = await render(candidates[middle])
        except ApiError as error:
            if error.code != "context_length_exceeded":
                raise
            low = middle + 1
        else:
            if len(prompt.tokens) > most_tokens:
                low = middle + 1
            elif middle == low:
                return prompt
            else:
                high = middle
        middle = (low + high) // 2
    return await render(candidates[low])
