"""`POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`."""

from __future__ import annotations

from starlette.datastructures import QueryParams

from app.api.context import Context
from app.api.endpoints.conversation import prompt_of, template_messages
from app.api.endpoints.large import listed, whole
from app.api.endpoints.logprobs import token_name
from app.api.endpoints.tool_choice import shown_tools
from app.api.http.call import Call
from app.api.http.errors import invalid
from app.api.schema.other import DetokenizeRequest, TokenizeRequest


class Tokens:
    """Handlers of the tokenizer's routes."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def tokenize(self, call: Call) -> None:
        """Token ids of a text or of a conversation under the chat template."""
        body = await call.read_json(TokenizeRequest)
        context = self._context.of(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("Give either prompt or messages.", "prompt")
        if body.prompt is not None:
            tokens = await context.text.encode(
                body.prompt, add_special_tokens=body.add_special_tokens
            )
        else:
            prompt = await prompt_of(
                context,
                template_messages(body.messages or [], context.options),
                tools=shown_tools(body.tools or []),
                add_generation_prompt=body.add_generation_prompt,
            )
            tokens = prompt.tokens
        names = [b"null"]
        if body.return_token_strs:
            names = await listed(tokens, lambda token: token_name(context.text, token))
        content = {"count": len(tokens), "max_model_len": context.engine.card.max_model_len}
        written = whole(content, tokens=await listed(tokens), token_strs=names)
        await call.reply(200, list(written))

    async def info(self, call: Call) -> None:
        """What a client needs to write prompts as chats are written here: the template in use and
        the special tokens by their roles. `?model=NAME` says which of several."""
        context = self._context.of(QueryParams(call.scope["query_string"]).get("model"))
        longest = {"model_max_length": context.engine.card.max_model_len}
        await call.reply_json({**context.text.described, **longest})

    async def detokenize(self, call: Call) -> None:
        """The text of token ids."""
        body = await call.read_json(DetokenizeRequest)
        context = self._context.of(body.model)
        context.check_ids(body.tokens, "tokens")
        text = await context.text.decode_aside(
            body.tokens, skip_special_tokens=body.skip_special_tokens
        )
        await call.reply_json({"prompt": text})
