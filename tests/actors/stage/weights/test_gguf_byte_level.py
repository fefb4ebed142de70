"""A byte-level tokenizer of a GGUF file has the file's own tokens and llama.cpp's splits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
from transformers.convert_slow_tokenizer import bytes_to_unicode

from actors.stage.gguf_folder import model_folder
from actors.stage.grammars.tokenizer import read_tokenizer
from actors.stage.models.config import ModelError
from tests.actors.stage.weights.gguf_files import write

BYTES = sorted(bytes_to_unicode().values())
LLAMA3 = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>")
DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")


def write_file(
    path: Path,
    pre: str | None,
    *,
    variant: str = "llama",
    merges: Sequence[str] = ("t h",),
    words: Sequence[str] = (),
    control: Sequence[str] = LLAMA3,
    kind_of_control: gguf.TokenType = gguf.TokenType.CONTROL,
    user_defined: Sequence[str] = (),
    add_bos: bool | None = None,
    num_rows: int | None = None,
) -> list[str]:
    """The tokens: bytes, results of the merges, words, control and user-defined ones. The first
    control token begins a text, the second ends it."""
    results = [merge.replace(" ", "") for merge in merges]
    tokens = [*BYTES, *results, *words, *control, *user_defined]
    kinds = [gguf.TokenType.NORMAL] * (len(BYTES) + len(results) + len(words))
    kinds += [kind_of_control] * len(control)
    kinds += [gguf.TokenType.USER_DEFINED] * len(user_defined)

    def tokenizer(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_token_merges(list(merges))
        writer.add_bos_token_id(tokens.index(control[0]))
        writer.add_eos_token_id(tokens.index(control[1]))
        if add_bos is not None:
            writer.add_add_bos_token(add_bos)

    write(path, variant, tokenizer=tokenizer, vocab_size=num_rows or len(tokens))
    return tokens


def read(path: Path) -> Any:
    """As front and grammars read it."""
    return read_tokenizer(model_folder(path, path.parent / "cache"))


@pytest.mark.parametrize("variant", ["llama", "qwen2"])  # for qwen2 transformers has a class
def test_control_tokens_are_those_of_the_file(tmp_path: Path, variant: str) -> None:
    path = tmp_path / "tiny.gguf"
    tokens = write_file(
        path,
        "deepseek-r1-qwen",
        variant=variant,
        control=DEEPSEEK,
        user_defined=("<think>", "a  b", "猫猫"),
        add_bos=True,
    )
    tokenizer = read(path)
    assert tokenizer.get_vocab() == {token: number for number, token in enumerate(tokens)}
    assert (tokenizer.bos_token, tokenizer.eos_token) == DEEPSEEK[:2]
    parts = [*DEEPSEEK[2:], "<think>", "a  b", "猫猫", DEEPSEEK[1]]
    ids = [tokens.index(part) for part in (DEEPSEEK[0], *parts)]
    assert tokenizer.encode("".join(parts)) == ids
    assert tokenizer.decode(ids) == "".join((DEEPSEEK[0], *parts))
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>a  b猫猫"
    assert max(tokenizer.encode("<|endoftext|>猫")) < len(tokens)  # no token of this file


def test_begin_and_end_are_tokens_whatever_their_type(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    normal = gguf.TokenType.NORMAL
    tokens = write_file(path, "qwen2", control=DEEPSEEK, kind_of_control=normal, add_bos=True)
    tokenizer = read(path)
    begin, end = map(tokens.index, DEEPSEEK[:2])
    assert tokenizer.encode(f"a{DEEPSEEK[1]}") == [begin, tokens.index("a"), end]
    assert max(tokenizer.get_vocab().values()) < len(tokens)


def ends(path: Path) -> list[int]:
    folder = model_folder(path, path.parent / "cache")
    found: list[int] = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    return found


def test_ends_of_turns_are_known_beside_the_end_of_text(tmp_path: Path) -> None:
    """gpt-oss ends each message of a turn, and Gemma 4 stops for what a tool answers."""
    path = tmp_path / "tiny.gguf"
    messages = ("<|startoftext|>", "<|return|>", "<|call|>", "<|end|>", "<|endoftext|>")
    tokens = write_file(path, "gpt-4o", control=messages)
    assert ends(path) == [tokens.index(text) for text in ("<|return|>", "<|call|>", messages[-1])]
    tokens = write_file(path, "qwen2", control=("<bos>", "<eos>", "<turn|>", "<|end|>"),
                        user_defined=["<|tool_response>"])  # fmt: skip
    wanted = ("<eos>", "<turn|>", "<|end|>", "<|tool_response>")
    assert ends(path) == [tokens.index(text) for text in wanted]


def test_more_tokens_than_the_embedding_has_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    num_tokens = len(write_file(path, "llama-bpe", num_rows=258))
    said = f"tokenizer.ggml.tokens has {num_tokens} tokens, but token_embd.weight only 258 rows"
    with pytest.raises(ModelError, match=said):
        read(path)


@pytest.mark.parametrize(
    ("pre", "add_bos", "begins"),
    [
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("tekken", None, True),
        ("qwen2", None, False),
        ("qwen2", True, True),
    ],
)
def test_a_begin_of_text_that_the_file_implies(
    tmp_path: Path, pre: str, add_bos: bool | None, begins: bool
) -> None:
    path = tmp_path / "tiny.gguf"
    write_file(path, pre, add_bos=add_bos)
    tokenizer = read(path)
    assert (tokenizer.encode("ab")[0] == tokenizer.bos_token_id) == begins
    assert tokenizer.bos_token_id not in tokenizer.encode("ab", add_special_tokens=False)


def test_a_whole_part_is_its_token_in_llama_3_and_glm_4(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    wholes = ("llama-bpe", "glm4", "glm5", "minicpm5", "youtu")
    for pre, whole in (("qwen2", False), *((pre, True) for pre in wholes)):
        write_file(path, pre, words=["xyz"])
        pieces = ["xyz"] if whole else ["x", "y", "z"]
        assert read(path).tokenize("xyz") == pieces


@pytest.mark.parametrize("variant", ["llama", "qwen2"])
@pytest.mark.parametrize(
    ("pre", "parts"),
    [
        ("default", ["ab", "Ġ", "12", "ĠĠ", "!?", "Ċ"]),
        ("gpt-2", ["ab", "Ġ12", "Ġ", "Ġ!?", "Ċ"]),
        ("a.x-4.0", ["ab", "Ġ12", "Ġ", "Ġ!?", "Ċ"]),
        ("smollm", ["ab", "Ġ", "1", "2", "Ġ", "Ġ!?", "Ċ"]),
        ("refact", ["ab", "Ġ", "1", "2", "Ġ", "Ġ!?", "Ċ"]),
        ("llama-bpe", ["ab", "Ġ", "12", "Ġ", "Ġ!?Ċ"]),
        ("qwen2", ["ab", "Ġ", "1", "2", "Ġ", "Ġ!?Ċ"]),
        ("seed-coder", ["ab", "Ġ", "1", "2", "Ġ", "Ġ!?", "Ċ"]),
        ("deepseek-coder", ["ab", "Ġ", "1", "2", "Ġ", "Ġ!?", "Ċ"]),
        ("deepseek-llm", ["ab", "Ġ", "12", "Ġ", "Ġ!?", "Ċ"]),
        ("deepseek-v3", ["ab", "Ġ", "12", "Ġ", "Ġ!?Ċ"]),
        ("hunyuan", ["ab", "Ġ", "1", "2", "Ġ", "Ġ!?Ċ"]),
        ("exaone4", ["ab", "Ġ12", "Ġ", "Ġ!?", "Ċ"]),
        ("command-r", ["ab", "Ġ", "1", "2", "Ġ", "Ġ!?", "Ċ"]),
        ("glm4", ["ab", "Ġ", "12", "Ġ", "Ġ!?Ċ"]),
        ("falcon", ["ab", "Ġ12", "ĠĠ", "!?", "Ċ"]),
        ("bloom", ["ab", "Ġ12", "ĠĠ!?Ċ"]),
        ("stablelm2", ["ab", "Ġ", "1", "2", "Ġ", "Ġ!?Ċ"]),
        ("exaone-moe", ["ab", "Ġ", "1", "2", "Ġ", "Ġ!?Ċ"]),
        ("qwen35", ["ab", "Ġ", "1", "2", "Ġ", "Ġ!?Ċ"]),
        ("exaone", ["ab", "Ġ", "1", "2", "Ġ", "Ġ!?", "Ċ"]),
        ("viking", ["ab", "Ġ", "1", "2", "ĠĠ!?Ċ"]),
        ("superbpe", ["abĠ", "12", "ĠĠ!?Ċ"]),
        ("minicpm5", ["ab", "Ġ", "12", "Ġ", "Ġ!?Ċ"]),
        ("youtu", ["ab", "Ġ", "1", "2", "Ġ", "Ġ!?Ċ"]),
        ("tiny_aya", ["ab", "Ġ", "12", "Ġ", "Ġ!?Ċ"]),
        ("glm5", ["ab", "Ġ", "12", "Ġ", "Ġ!?Ċ"]),
    ],
)
def test_text_is_split_as_the_file_says(
    tmp_path: Path, pre: str, parts: list[str], variant: str
) -> None:
    path = tmp_path / "tiny.gguf"
    write_file(path, pre, variant=variant)
    split = read(path).backend_tokenizer.pre_tokenizer.pre_tokenize_str("ab 12  !?\n")
    assert [part for part, _ in split] == parts


def test_the_default_split_takes_digits_by_threes(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_file(path, "default")
    split = read(path).backend_tokenizer.pre_tokenizer.pre_tokenize_str("it's x=12345")
    assert [part for part, _ in split] == ["it", "'", "s", "Ġx", "=", "123", "45"]


@pytest.mark.parametrize(
    ("pre", "text", "parts"),
    [
        ("superbpe", "is 1234567, of x12", ["is ", "1", "234", "567", ", of x", "12"]),
        ("tiny_aya", "It's 12345 CamelX/", ["It's", " ", "12", "345", " Camel", "X", "/"]),
        ("tiny_aya", "12345x", ["123", "45", "x"]),  # digits that end at no word's end
        ("minicpm5", "it's 12345  6", ["it", "'s", " ", "123", "45", "  ", "6"]),
        ("viking", "it's 12, (x)", ["it's", " ", "1", "2", ", (", "x", ")"]),
        ("ufakzeka", "Ankara's x12", ["Ankara", "'s", " x", "1", "2"]),
        ("ufakzeka", "Ankara'da", ["Ankara", "'da"]),  # Qwen-2 splits 'd off
        ("youtu", "It's 가나漢字かなㄅㄆ，。x12", [
            "It's", " ", "가나", "漢字かな", "ㄅㄆ", "，。", "x", "1", "2",
        ]),
    ],
)  # fmt: skip
def test_digits_and_scripts(tmp_path: Path, pre: str, text: str, parts: list[str]) -> None:
    path = tmp_path / "tiny.gguf"
    write_file(path, pre)
    split = read(path).backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in split] == parts


def test_kimi_splits_chinese_from_other_letters(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_file(path, "kimi-k2")
    text = "漢字ab CamelIt's 가漢1234?!\n  x"
    split = read(path).backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    parts = [text[start:end] for _, (start, end) in split]
    assert parts == ["漢字", "ab", " Camel", "It's", " 가", "漢", "123", "4", "?!\n", " ", " x"]


def test_exaone_moe_takes_words_in_a_row(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_file(path, "exaone-moe")
    text = "가나 다 a1 b"
    split = read(path).backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in split] == ["가나 다 a", "1", " b"]


def test_deepseek_llm_splits_by_script(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_file(path, "deepseek-llm")
    tokenizer = read(path).backend_tokenizer
    text = "Это é猫 가나12!x  աբ  "  # of Armenian, only capitals are in DeepSeek's list
    split = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    parts = [text[start:end] for _, (start, end) in split]
    assert parts == ["Это", " é", "猫", " ", "가나", "12", "!", "x", "  աբ", "  "]


def test_deepseek_v3_splits_by_script_and_signs(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_file(path, "hunyuan-dense")
    tokenizer = read(path).backend_tokenizer
    text = "x=12345 e\u0301 (ab) 漢かナ가  "
    split = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    parts = [text[start:end] for _, (start, end) in split]
    assert parts == ["x", "=", "123", "45", " e\u0301", " (", "ab", ")", " ", "漢かナ", "가", "  "]


@pytest.mark.parametrize(("variant", "as_in"), [("llama", "default"), ("qwen2", "qwen2")])
def test_a_file_that_names_no_split_is_warned_of(
    tmp_path: Path, variant: str, as_in: str, caplog: pytest.LogCaptureFixture
) -> None:
    backends = []
    for pre in (as_in, None):
        path = tmp_path / f"{pre}.gguf"
        write_file(path, pre, variant=variant)
        caplog.clear()
        backends.append(read(path).backend_tokenizer.to_str())
        said = f"{path} has no tokenizer.ggml.pre: text is split as {as_in!r} means"
        assert (said in caplog.messages) == (pre is None)
    assert backends[0] == backends[1]


@pytest.mark.parametrize("variant", ["qwen2", "qwen3"])
def test_letters_and_accents_are_composed_as_in_qwens_folders(tmp_path: Path, variant: str) -> None:
    path = tmp_path / "tiny.gguf"
    for pre, composed in (("qwen2", True), ("smollm", False)):
        write_file(path, pre, variant=variant)
        tokenizer = read(path)
        assert (tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")) == composed


def test_an_unknown_split_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_file(path, "of-tomorrow")
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.pre 'of-tomorrow' is not known"):
        read(path)
