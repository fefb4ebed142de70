"""The tokenizer of a GGUF file of SentencePiece's kind gives the ids of transformers' own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import pytest
import transformers
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from actors.stage.gguf_folder import model_folder
from actors.stage.models.config import ModelError
from tests.actors.stage.weights.gguf_files import write

Token = gguf.TokenType
TEXT = (
    "The scheduler fills each step with decodes and with slices of a prompt.\n"
    "A token budget of 512 keeps the time between tokens below its objective; the rest waits.\n"
    "for request in waiting:\n    take = min(request.left, budget)\n    budget -= take\n"
) * 3
MIXED = [
    "The budget of the scheduler",
    " a blank before",
    "   three before, two behind  ",
    "a  b   c    d     e      f",
    "tabs\tand\nlines\n\nand more\r\n",
    "naïve 猫 😀 é \u0000\u200b",
    "1234 + 5,678 = x",
    "",
    " ",
    "▁odd▁one",
    "<s>begins, ends</s>goes on",
    "<|user|>\nA question <|end|> \n<|assistant|>\n",
    "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
    "<|endoftext|> \n behind",
    "half <s of a token <|use",
]
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_BLANKS = ["▁" * number for number in range(2, 6)]


@dataclass(frozen=True)
class Pieces:
    """A vocabulary as a model of SentencePiece holds it: tokens in the order of their ids."""

    tokens: list[str]
    kinds: list[int]
    merges: list[tuple[str, str]]

    @property
    def vocab(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(self.tokens)}

    @property
    def control(self) -> list[str]:
        kinds = zip(self.tokens, self.kinds, strict=True)
        return [token for token, kind in kinds if kind == Token.CONTROL]


def pieces(heads: dict[str, int], blanks: Sequence[str] = (), behind: Sequence[str] = ()) -> Pieces:
    """heads: first tokens and their kinds. blanks: tokens of blanks alone. behind: last ones."""
    bare = Tokenizer(models.BPE())
    bare.normalizer = normalizers.Replace(" ", "▁")
    bare.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=220, show_progress=False)
    bare.train_from_iterator(TEXT.splitlines(), trainer)
    learned = sorted(bare.get_vocab(), key=bare.get_vocab().__getitem__)
    runs = list(blanks)
    joined = [*runs, *(token for token in learned if len(token) > 1 and token not in runs)]
    letters = [token for token in learned if len(token) == 1]
    known = {*joined, *letters}
    merges = [
        (token[:at], token[at:])
        for token in joined
        for at in range(1, len(token))
        if {token[:at], token[at:]} <= known
    ]
    kinds = [*heads.values(), *[Token.BYTE] * 256, *[Token.USER_DEFINED] * len(runs)]
    kinds += [Token.NORMAL] * (len(joined) - len(runs) + len(letters))
    kinds += [Token.CONTROL] * len(behind)
    return Pieces([*heads, *_BYTES, *joined, *letters, *behind], kinds, merges)


def write_file(
    path: Path, variant: str, vocabulary: Pieces, model: str = "llama", **flags: bool
) -> None:
    """As llama.cpp's converter does: scores fall with the rank of a piece, blanks of pieces that a
    user defined are written as such, and merges are not written; of Gemma 4, they are, and blanks
    are not."""
    names = vocabulary.vocab
    ends = {"gemma2": ("<bos>", "<eos>")}.get(variant, ("<s>", "</s>"))

    def tokenizer(writer: gguf.GGUFWriter) -> None:
        scores = [-float(number) for number in range(len(names))]
        spelled = [
            token.replace("▁", " ") if kind == Token.USER_DEFINED and model == "llama" else token
            for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
        ]
        writer.add_tokenizer_model(model)
        if model == "llama":
            writer.add_tokenizer_pre("default")
        else:
            writer.add_token_merges([" ".join(merge) for merge in vocabulary.merges])
        writer.add_token_list(spelled)
        writer.add_token_scores(scores)
        writer.add_token_types(vocabulary.kinds)
        writer.add_bos_token_id(names[ends[0]])
        writer.add_eos_token_id(names[ends[1]])
        writer.add_unk_token_id(names["<unk>"])
        for name, flag in flags.items():
            getattr(writer, f"add_{name}")(flag)

    tied = {"tie_word_embeddings": True} if variant == "gemma2" else {}
    write(path, variant, tokenizer=tokenizer, vocab_size=len(names), **tied)


LLAMA_HEADS = {"<unk>": Token.UNKNOWN, "<s>": Token.CONTROL, "</s>": Token.CONTROL}
GEMMA_HEADS = {
    "<pad>": Token.CONTROL,
    "<eos>": Token.CONTROL,
    "<bos>": Token.CONTROL,
    "<unk>": Token.UNKNOWN,
    "<mask>": Token.CONTROL,
    "<start_of_turn>": Token.CONTROL,
    "<end_of_turn>": Token.CONTROL,
}
PHI3_TURNS = ("<|endoftext|>", "<|assistant|>", "<|end|>", "<|user|>")


def llama(vocabulary: Pieces, **options: Any) -> Any:
    return transformers.LlamaTokenizer(vocab=vocabulary.vocab, merges=vocabulary.merges, **options)


def gemma(vocabulary: Pieces) -> Any:
    theirs = transformers.GemmaTokenizer(vocab=vocabulary.vocab, merges=vocabulary.merges)
    theirs.add_special_tokens({"additional_special_tokens": vocabulary.control[4:]})
    return theirs


def phi3(vocabulary: Pieces) -> Any:
    """As Phi-3's folder has it: the prefix by a normalizer, turns that take blanks behind them."""
    backend = Tokenizer(
        models.BPE(
            vocab=vocabulary.vocab,
            merges=vocabulary.merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    turns = [AddedToken(t, rstrip=True, normalized=False) for t in ("</s>", *PHI3_TURNS[1:])]
    plain = [AddedToken(t, normalized=False) for t in ("<unk>", "<s>", "<|endoftext|>")]
    backend.add_special_tokens([*turns, *plain])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, add_bos_token=False)


CASES: dict[str, tuple[str, Pieces, dict[str, bool], Callable[[Pieces], Any]]] = {
    "llama": ("llama", pieces(LLAMA_HEADS), {"add_bos_token": True}, llama),
    "llama-no-prefix": (
        "llama",
        pieces(LLAMA_HEADS),
        {"add_bos_token": True, "add_space_prefix": False},
        lambda vocabulary: llama(vocabulary, add_prefix_space=False),
    ),
    "gemma": (
        "gemma2",
        pieces(GEMMA_HEADS, _BLANKS),
        {"add_bos_token": True, "add_space_prefix": False},
        gemma,
    ),
    "phi3": ("phi3", pieces(LLAMA_HEADS, behind=PHI3_TURNS), {"add_bos_token": False}, phi3),
}


@pytest.mark.parametrize("case", CASES)
def test_ids_and_texts_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    variant, vocabulary, flags, theirs_of = CASES[case]
    write_file(tmp_path / "tiny.gguf", variant, vocabulary, **flags)
    ours = transformers.AutoTokenizer.from_pretrained(model_folder(tmp_path, tmp_path / "cache"))
    theirs = theirs_of(vocabulary)
    assert len(ours) == len(vocabulary.tokens)
    for text in MIXED:
        ids = theirs.encode(text, add_special_tokens=False)
        found = ours.encode(text, add_special_tokens=False)
        assert found == ids, (text, [vocabulary.tokens[i] for i in found])
        for skip in (False, True):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                ids, skip_special_tokens=skip
            )
    first = ours.encode("The")[0]
    assert (first == ours.bos_token_id) == flags["add_bos_token"]
    assert vocabulary.tokens[ours.bos_token_id] == ("<bos>" if case == "gemma" else "<s>")


def test_gemma_4_has_merges_and_no_begin_of_text_of_its_own(tmp_path: Path) -> None:
    """Its chat template writes that, as in its folders."""
    vocabulary = pieces(GEMMA_HEADS, _BLANKS)
    flags = {"add_bos_token": True, "add_space_prefix": False}
    write_file(tmp_path / "tiny.gguf", "gemma2", vocabulary, "gemma4", **flags)
    ours = transformers.AutoTokenizer.from_pretrained(model_folder(tmp_path, tmp_path / "cache"))
    theirs = gemma(vocabulary)
    assert ours.get_vocab() == vocabulary.vocab
    for text in MIXED:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids)


def test_a_token_that_the_file_lacks_is_none(tmp_path: Path) -> None:
    """Of other names than Llama's own, which transformers adds behind the vocabulary."""
    heads = dict.fromkeys(("<pad>", "<bos>", "<eos>"), Token.CONTROL)
    vocabulary = pieces(heads)

    def tokenizer(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(vocabulary.tokens)
        writer.add_token_scores([-float(number) for number in range(len(vocabulary.tokens))])
        writer.add_token_types(vocabulary.kinds)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)

    write(tmp_path / "tiny.gguf", tokenizer=tokenizer, vocab_size=len(vocabulary.tokens))
    ours = transformers.AutoTokenizer.from_pretrained(model_folder(tmp_path, tmp_path / "cache"))
    assert ours.get_vocab() == vocabulary.vocab
    assert ours.encode("<bos><eos>", add_special_tokens=False) == [1, 2]
    assert ours.decode(ours.encode("The <s>", add_special_tokens=False)) == "The <s>"


def test_a_vocabulary_without_scores_names_the_file(tmp_path: Path) -> None:
    def tokenizer(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["<unk>", "a"])

    write(tmp_path / "tiny.gguf", "llama", tokenizer=tokenizer, vocab_size=2)
    with pytest.raises(ModelError, match=r"tiny\.gguf: its tokenizer cannot be read"):
        model_folder(tmp_path, tmp_path / "cache")
