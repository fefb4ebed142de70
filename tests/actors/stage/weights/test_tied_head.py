"""A head that is stored though the config ties it to the embedding, beside it or in its place."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file, save_model

from actors.stage.folder_check import check_folder
from actors.stage.runner import StageRunner
from actors.stage.spec import StageSpec
from tests.actors.stage.greedy_reference import GREEDY, expected, make_prompts
from tests.actors.stage.mini_planner import MiniPlanner, make_chain
from tests.actors.stage.rank_pool import RankPool


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_folder_may_store_the_head_in_place_of_the_embedding(
    tiny_model: Callable[..., Path], tmp_path: Path, num_stages: int
) -> None:
    """As safetensors' `save_model` does, which keeps one name of a tensor."""
    folder = shutil.copytree(tiny_model("llama-tied"), tmp_path / "model")
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    save_model(model, str(folder / "model.safetensors"), {"format": "pt"})
    stored = load_file(folder / "model.safetensors")
    assert "lm_head.weight" in stored
    assert "model.embed_tokens.weight" not in stored
    assert check_folder(folder) == check_folder(tiny_model("llama-tied"))
    planner = MiniPlanner(make_chain(folder, num_stages), feeds=num_stages > 1)
    assert planner.run(make_prompts(), GREEDY) == expected("llama-tied")


@pytest.fixture
def untied(tiny_model: Callable[..., Path], tmp_path: Path) -> Path:
    """A head of its own, which the config denies."""
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))
    return folder


@pytest.mark.parametrize("num_stages", [1, 2])
def test_one_that_differs_is_used(untied: Path, num_stages: int) -> None:
    """As in transformers, which ties only what is absent or equal."""
    planner = MiniPlanner(make_chain(untied, num_stages), feeds=num_stages > 1)
    assert planner.run(make_prompts(), GREEDY) == expected("llama")
    theirs = transformers.LlamaForCausalLM.from_pretrained(untied)
    assert not torch.equal(theirs.lm_head.weight, theirs.model.embed_tokens.weight)


def test_rows_of_one_rank_may_be_those_of_the_embedding(untied: Path, ranks: RankPool) -> None:
    """Each rank compares what it reads; all of them together hold the stored head."""
    path = untied / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"][:132] = tensors["model.embed_tokens.weight"][:132]
    save_file(tensors, path, {"format": "pt"})
    whole = MiniPlanner(make_chain(untied)).run(make_prompts(), GREEDY)
    assert whole != expected("llama")
    ranks.make(untied)
    assert MiniPlanner(ranks.execute).run(make_prompts(), GREEDY) == whole


def test_a_copy_of_the_embedding_is_not_kept_twice(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    def num_parameters(folder: Path) -> int:
        return StageRunner(StageSpec(str(folder), backend="torch")).info.num_parameters

    folder = shutil.copytree(tiny_model("llama-tied"), tmp_path / "model")
    without = num_parameters(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    copied = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(copied, path, {"format": "pt"})
    assert num_parameters(folder) == without
    assert MiniPlanner(make_chain(folder)).run(make_prompts(), GREEDY) == expected("llama-tied")
