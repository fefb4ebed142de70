"""A GGUF file in parts is served as one file is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from actors.stage.folder_check import check_folder
from actors.stage.gguf_folder import gguf_in, model_folder
from actors.stage.models.config import GGUF_LINK, ModelError
from tests.actors.stage.greedy_reference import make_prompts
from tests.actors.stage.mini_planner import MiniPlanner, make_chain
from tests.actors.stage.weights.gguf_files import Kind, write
from tests.actors.stage.weights.test_packed import GREEDY, LENGTHS, answers

FIRST, SECOND, THIRD = (f"big-0000{number}-of-00003.gguf" for number in (1, 2, 3))


def refused(path: Path, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        check_folder(model_folder(path, path.parent / "cache"))


def test_parts_give_the_tokens_of_their_model(tmp_path: Path) -> None:
    """Named by the first, by their folder, or by links to files of other names, as the hub's cache
    has them."""
    parts, links = tmp_path / "parts", tmp_path / "links"
    parts.mkdir()
    links.mkdir()
    model = write(parts / "big.gguf", "qwen2", Kind.Q8_0, max_tensors=16)
    assert sorted(file.name for file in parts.iterdir()) == [FIRST, SECOND, THIRD]
    cache = tmp_path / "cache"
    folder = model_folder(parts / FIRST, cache)
    assert folder.name.startswith("big-")
    assert model_folder(parts, cache) == folder
    for number, file in enumerate(sorted(parts.iterdir())):
        (links / file.name).symlink_to(file.rename(parts / f"blob {number}"))
    assert gguf_in(links) == links / FIRST
    folder = model_folder(links, cache)
    assert (folder / GGUF_LINK).resolve() == parts / "blob 0"
    chain = make_chain(folder, 2, dtype="float32")
    assert MiniPlanner(chain, feeds=True).run(make_prompts(LENGTHS), GREEDY) == answers(model)
    (parts / "blob 2").write_bytes(b"GGUF")
    assert not folder.samefile(links)
    refused(links, f"{THIRD} is not a GGUF file or is truncated")


def test_the_first_part_may_hold_no_tensors(tmp_path: Path) -> None:
    model = write(tmp_path / "big.gguf", "qwen2", max_tensors=20, empty_first=True)
    assert len(list(tmp_path.glob("big-*-of-00003.gguf"))) == 3
    chain = make_chain(model_folder(tmp_path, tmp_path / "cache"))
    assert MiniPlanner(chain).run(make_prompts(LENGTHS), GREEDY) == answers(model)


def test_parts_that_are_missing_or_not_of_the_file_are_named(tmp_path: Path) -> None:
    write(tmp_path / "big.gguf", "qwen2", max_tensors=16)
    whole = {name: (tmp_path / name).read_bytes() for name in (FIRST, SECOND, THIRD)}
    refused(tmp_path / SECOND, f"{SECOND} is part 2 of 3; name the first, {FIRST}")
    (tmp_path / THIRD).write_bytes(whole[SECOND])
    refused(tmp_path, f"{THIRD} is part 2 of 3, not 3 of 3 as its name says")
    (tmp_path / THIRD).unlink()
    refused(tmp_path, f"{THIRD}, part 3 of 3, cannot be read: No such file or directory")
    (tmp_path / THIRD).write_bytes(whole[THIRD])
    (tmp_path / FIRST).unlink()
    refused(tmp_path, f"{FIRST}, part 1 of 3, cannot be read: No such file or directory")
    (tmp_path / FIRST).write_bytes(whole[FIRST])
    shutil.copy(tmp_path / FIRST, tmp_path / "other.gguf")
    refused(tmp_path, rf"several GGUF files \({FIRST}, other.gguf\): name one")
    refused(tmp_path / "other.gguf", "other-00002-of-00003.gguf is missing beside it")


def test_parts_of_two_models_do_not_make_one(tmp_path: Path) -> None:
    for layers in (2, 3):
        folder = tmp_path / str(layers)
        folder.mkdir()
        write(folder / "big.gguf", "qwen2", max_tensors=20, num_hidden_layers=layers)
    second = SECOND.replace("00003", "00002")
    shutil.copy(tmp_path / "3" / second, tmp_path / "2" / second)
    refused(tmp_path / "2", r"big-00001-of-00002\.gguf: its parts hold 38 tensors, not 26")
