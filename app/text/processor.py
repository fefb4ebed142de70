"""Everything that turns text into tokens and back, for one model folder."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from actors.stage.grammars.tokenizer import read_tokenizer, special_ids
from actors.stage.grammars.vocabulary import token_bytes_table
from app.text.chat_template import TEMPLATE_LIMIT_S, ChatTemplate, TemplateBroken, TemplateBusy
from app.text.grammars import GrammarChecker
from app.text.incremental import Detokenizer, PrefixDetokenizer, TableDetokenizer
from app.text.output.hermes import Hermes
from app.text.output.registry import choose_formats

# Tokenizing runs at some 1-3 MB/s: up to this length it is quicker than a thread's round trip.
_INLINE_CHARS: Final = 512
_LONG_CHARS: Final = 1 << 16
_INLINE_TOKENS: Final = 2048
_MAX_WAITING_CHARS: Final = 32 << 20  # of long chats, which are rendered at some 10 MB/s


class TokenizerError(ValueError):
    """A model folder has no tokenizer that can be read; the message names it."""


class TextProcessor:
    """Tokenizer, chat template, detokenizer and grammar check of one model.

    Loading reads only data: `trust_remote_code` is never set, and the chat template is tried in
    its sandbox first (raises TemplateHostile when it must not be served). Methods named `*_now`
    compute in the calling thread; the others leave the event loop free.

    threads: how many prompts are tokenized at a time beside the event loop. tool_parser,
    reasoning_parser: names of `app.text.output.registry`; raises ValueError for an unknown one.
    Raises TokenizerError.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        chat_template: str | None = None,
        template_limit_s: float = TEMPLATE_LIMIT_S,
        threads: int = 2,
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
    ) -> None:
        self.model_path = str(model_path)
        tokenizer = load_tokenizer(self.model_path)
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:  # limits stored for training must not cut prompts short
            self._backend.no_truncation()
            self._backend.no_padding()
        self.vocab_size = len(tokenizer)
        self.special_ids = special_ids(tokenizer)
        self.eos_token_ids: tuple[int, ...] = (
            () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
        )
        backend = self._backend
        table = None if backend is None else token_bytes_table(backend, self.special_ids)
        self._full_table = table  # special tokens by name
        self._longest_token = max(map(len, table), default=1) if table else 0
        self._shown_table = table and [
            b"" if token in self.special_ids else raw for token, raw in enumerate(table)
        ]
        self._tables: dict[frozenset[str], list[bytes]] = {}
        self._threads = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="text")
        self._long_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="long-text")
        self._template_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="template")
        # Of one child process in turns with the other, so that a short chat waits for one long one.
        self._long_chats = ThreadPoolExecutor(max_workers=1, thread_name_prefix="long-chat")
        self._num_waiting_chars = 0  # of long chats
        templates = _templates(chat_template or tokenizer.chat_template)
        self.formats = choose_formats(templates.values(), tool_parser, reasoning_parser)
        self.described: Mapping[str, Any] = {  # as by a tokenizer_config.json
            "tokenizer_class": type(tokenizer).__name__,
            "chat_template": templates.get("default", templates or None),
            **_special_tokens(tokenizer),
        }
        self.template = ChatTemplate(
            templates,
            _special_tokens(tokenizer),
            limit_s=template_limit_s,
            write_calls=(self.formats.tools or Hermes).written,
        )
        self.template_problem: str | None = None  # completions need no template
        try:
            self.template.check()
        except TemplateBroken as broken:
            self.template_problem = str(broken)
        self.grammars = GrammarChecker(self.model_path)
        self.pooling = _pooling(Path(self.model_path))
        self.sampling_defaults: Mapping[str, float] = {}  # the model's, by names in requests

    # ---- text to tokens ---------------------------------------------------------------

    def encode_now(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenize in this thread."""
        if self._backend is not None:  # of its two forms only the batch lets other threads run
            found = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
            ids: list[int] = found[0].ids
            return ids
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenize; long texts in a thread, very long ones queueing in one of their own."""
        return (await self.encode_all((text,), add_special_tokens=add_special_tokens))[0]

    async def encode_all(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Like `encode`, for texts that are long together."""

        def encoded() -> list[list[int]]:  # one by one: a batch would take every core
            return [self.encode_now(text, add_special_tokens=add_special_tokens) for text in texts]

        num_chars = sum(map(len, texts))
        if num_chars <= _INLINE_CHARS:
            return encoded()
        return await asyncio.get_running_loop().run_in_executor(
            self._threads if num_chars <= _LONG_CHARS else self._long_thread, encoded
        )

    def surely_exceeds(self, num_chars: int, num_tokens: int) -> bool:
        """Whether a text of this length must have more tokens than these.

        Normalizing may shorten a text before it is tokenized, hence the margin.
        """
        return self._longest_token > 0 and num_chars > 4 * self._longest_token * num_tokens

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Prompt text of a conversation; raises TemplateError, TemplateBusy."""

        def rendered() -> str:
            return self.template.render(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                variables=variables,
            )

        loop = asyncio.get_running_loop()
        try:
            num_chars = len(repr((messages, tools)))  # roughly the prompt's
        except RecursionError:  # a call's arguments are deep
            num_chars = _LONG_CHARS + 1
        if num_chars <= _LONG_CHARS:
            return await loop.run_in_executor(self._template_thread, rendered)
        if self._num_waiting_chars > _MAX_WAITING_CHARS:
            raise TemplateBusy("too many long chats wait to be rendered")
        self._num_waiting_chars += num_chars
        try:
            return await loop.run_in_executor(self._long_chats, rendered)
        finally:
            self._num_waiting_chars -= num_chars

    # ---- tokens to text ---------------------------------------------------------------

    def detokenizer(
        self,
        prompt: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        shown_special: frozenset[str] = frozenset(),
    ) -> Detokenizer:
        """A new incremental detokenizer for what follows `prompt`.

        shown_special: special tokens that are not skipped; where tokens do not decode on their own,
        none is skipped then.
        """
        if skip_special_tokens and shown_special:
            table = self._table_showing(shown_special)
            skip_special_tokens = False
        else:
            table = self._shown_table if skip_special_tokens else self._full_table
        if table is not None:
            return TableDetokenizer(table)
        return PrefixDetokenizer(self._decoder(skip_special_tokens), prompt)

    def _table_showing(self, names: frozenset[str]) -> list[bytes] | None:
        if self._full_table is None or self._shown_table is None:
            return None
        table = self._tables.get(names)
        if table is None:
            shown = {name.encode() for name in names}
            table = list(self._shown_table)
            for token in self.special_ids:
                if token < len(table) and self._full_table[token] in shown:
                    table[token] = self._full_table[token]
            self._tables[names] = table
        return table

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole token sequence."""
        return self._decoder(skip_special_tokens)(tokens)

    async def decode_aside(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Like `decode`, but decodes a long sequence in a thread."""
        return (await self.decode_all((tokens,), skip_special_tokens=skip_special_tokens))[0]

    async def decode_all(
        self, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool = True
    ) -> list[str]:
        """Like `decode_aside`, for sequences that are long together."""
        backend = self._backend
        if sum(map(len, sequences)) <= _INLINE_TOKENS or backend is None:
            decode = self._decoder(skip_special_tokens)
            return [decode(tokens) for tokens in sequences]

        def decoded() -> list[str]:  # of the backend's two forms only the batch frees the loop
            batches = ([list(tokens)] for tokens in sequences)
            return [
                backend.decode_batch(one, skip_special_tokens=skip_special_tokens)[0]
                for one in batches
            ]

        return await asyncio.get_running_loop().run_in_executor(self._threads, decoded)

    def token_bytes(self, token: int) -> bytes:
        """The bytes one token stands for, special tokens by name; may be part of a character."""
        if self._full_table is not None:
            return self._full_table[token] if token < len(self._full_table) else b""
        return self.decode([token], skip_special_tokens=False).encode()

    def close(self) -> None:
        """End threads and child processes."""
        for pool in (self._threads, self._long_thread, self._template_thread, self._long_chats):
            pool.shutdown(wait=False, cancel_futures=True)
        self.template.close()
        self.grammars.close()

    # ---- helpers ----------------------------------------------------------------------

    def _decoder(self, skip_special_tokens: bool) -> Callable[[Sequence[int]], str]:
        source = self._backend if self._backend is not None else self._tokenizer

        def decode(tokens: Sequence[int]) -> str:
            return str(source.decode(list(tokens), skip_special_tokens=skip_special_tokens))

        return decode


def _templates(found: str | Mapping[str, str] | None) -> dict[str, str]:
    if not found:
        return {}
    return {"default": found} if isinstance(found, str) else dict(found)


def _pooling(folder: Path) -> str | None:
    """How the model's embeddings are made where a request does not say: as sentence-transformers
    reads it, mean where there is nothing to read; None for a way that there is not."""
    try:
        said = dict(json.loads((folder / "1_Pooling/config.json").read_text(encoding="utf-8")))
    except OSError:
        return "mean"
    except (ValueError, TypeError):
        return None
    modes = {key for key, value in said.items() if key.startswith("pooling_mode_") and value}
    known = {"pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last"}
    return known.get(modes.pop()) if len(modes) == 1 else None


def check_templates(folder: str) -> None:
    """Raises TokenizerError, TemplateError or TemplateBusy for a folder that cannot be used."""
    tokenizer = load_tokenizer(folder)
    template = ChatTemplate(_templates(tokenizer.chat_template), _special_tokens(tokenizer))
    try:
        template.check()
    finally:
        template.close()


def load_tokenizer(folder: str) -> Any:
    """The tokenizer of a model folder. Raises TokenizerError."""
    try:
        return read_tokenizer(Path(folder))
    except Exception as error:  # of any type: what is wrong is found late, deep in a library
        if not (Path(folder) / "tokenizer.json").is_file():
            other = Path(folder) / "tokenizer.model"
            hint = (
                " but tokenizer.model, which transformers does not read here: load it with "
                "AutoTokenizer where its code may run, and save_pretrained to this folder"
            )
            raise TokenizerError(
                f"model.path: {folder} holds no tokenizer.json{hint if other.is_file() else ''}"
            ) from error
        line = (str(error).splitlines() or [""])[0]
        raise TokenizerError(
            f"model.path: {folder}/tokenizer.json or tokenizer_config.json cannot be read: "
            f"{type(error).__name__}: {line}"
        ) from error


def _special_tokens(tokenizer: Any) -> dict[str, str]:
    """Names such as `bos_token`, which templates write out."""
    return {
        name: str(token)
        for name, token in tokenizer.special_tokens_map.items()
        if isinstance(token, str)
    }
