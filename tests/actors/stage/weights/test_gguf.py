"""GGUF files give the tokens of the model that they stand for, as transformers computes it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from actors.stage.folder_check import check_folder
from actors.stage.gguf_folder import model_folder
from actors.stage.models.config import ModelError
from actors.stage.models.read import load_config
from actors.stage.runner import StageRunner
from actors.stage.spec import StageSpec
from actors.stage.weights.folder import open_folder
from actors.stage.weights.gguf_config import config_of
from actors.stage.weights.gguf_file import GgufFile
from actors.stage.weights.names import all_shapes
from tests import tiny_models
from tests.actors.stage.greedy_reference import BY_LENGTH, make_prompts, skip_unless_available
from tests.actors.stage.mini_planner import MiniPlanner, make_chain
from tests.actors.stage.rank_pool import RankPool
from tests.actors.stage.weights.gguf_files import Kind, write
from tests.actors.stage.weights.test_packed import GREEDY, LENGTHS, answers

# What the format cannot say, as llama.cpp takes it to be.
_AS_CONVERTED: dict[str, dict[str, Any]] = {
    "qwen3-moe": {"mlp_only_layers": []},
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {"tie_word_embeddings": True, "query_pre_attn_scalar": 16},
    "smollm3": {"no_rope_layer_interval": 4, "num_hidden_layers": 5},
}


@pytest.mark.parametrize(
    "variant",
    [
        "llama", "llama-tied", "llama-biased", "llama-head-dim", "llama-llama3", "llama-linear",
        "mixtral", "qwen2", "qwen3", "qwen3-moe", "gemma", "gemma2", "phi3", "phi3-longrope",
        "olmo2", "granite", "smollm3",
    ],
)  # fmt: skip
def test_families(tmp_path: Path, variant: str) -> None:
    model = write(tmp_path / "tiny.gguf", variant, **_AS_CONVERTED.get(variant, {}))
    folder = model_folder(tmp_path, tmp_path / "cache")
    planner = MiniPlanner(make_chain(folder, 2), feeds=True)
    right = answers(model, variant in BY_LENGTH)
    assert planner.run(make_prompts(LENGTHS), GREEDY) == right


@pytest.mark.parametrize(
    ("key", "factor"), [("yarn_attn_factor", 1.3), ("attn_factors", 0.7), ("yarn_attn_factor", 1.0)]
)
def test_yarn_may_scale_attention_by_a_factor_of_its_own(
    tmp_path: Path, key: str, factor: float
) -> None:
    """1 is what llama.cpp takes where nothing is said: the scaling's own."""
    rope = {**tiny_models.VARIANTS["llama-yarn"][1]["rope_parameters"]}
    if factor != 1:
        rope["attention_factor"] = factor
    path = tmp_path / "tiny.gguf"
    model = write(
        path, "llama-yarn", rope_parameters=rope,
        tune=lambda writer: getattr(writer, f"add_rope_scaling_{key}")(factor),
    )  # fmt: skip
    chain = make_chain(model_folder(path, tmp_path / "cache"))
    assert MiniPlanner(chain).run(make_prompts(LENGTHS), GREEDY) == answers(model)


@pytest.mark.parametrize("variant", ["gemma2", "gemma3"])
def test_gemma_s_scale_is_the_file_s_or_that_of_a_published_size(
    variant: str, tmp_path: Path
) -> None:
    def scalar(**options: Any) -> float:
        write(path, variant, **options)
        with closing(GgufFile(path)) as file:
            return float(config_of(file)["query_pre_attn_scalar"])

    path, layers = tmp_path / "tiny.gguf", {"gemma2": 46, "gemma3": 62}[variant]
    more: dict[str, Any] = {"tie_word_embeddings": True, "sliding_window_pattern": 6}
    assert scalar(**more) == 16  # of a head
    more["head_dim"] = 128
    assert scalar(**more, num_hidden_layers=layers) == 64 // 4
    assert scalar(**more, tune=lambda w: w.add_attention_scale(0.125)) == 64
    if variant == "gemma3":  # Rnj-1 is one of these
        assert scalar(**more) == 128
        return
    with pytest.raises(ModelError, match=r"heads of 128.*gemma2\.attention\.scale is needed"):
        scalar(**more)


def test_gemma3_has_a_window_in_five_layers_of_six(tmp_path: Path) -> None:
    model = write(
        tmp_path / "tiny.gguf", "gemma3", num_hidden_layers=7, sliding_window_pattern=6,
        query_pre_attn_scalar=16,
    )  # fmt: skip
    folder = model_folder(tmp_path, tmp_path / "cache")
    assert MiniPlanner(make_chain(folder)).run(make_prompts(LENGTHS), GREEDY) == answers(model)


def test_gemma3_may_have_no_windows(tmp_path: Path) -> None:
    """As in Rnj-1, of which the file says nothing of them."""
    model = write(
        tmp_path / "tiny.gguf", "gemma3", sliding_window_pattern=1, layer_types=None,
        query_pre_attn_scalar=16, tune=lambda w: w.kv_data[0].pop("gemma3.attention.sliding_window")
    )  # fmt: skip
    folder = model_folder(tmp_path, tmp_path / "cache")
    assert MiniPlanner(make_chain(folder)).run(make_prompts(LENGTHS), GREEDY) == answers(model)


def test_factors_of_long_texts_are_not_left_out(tmp_path: Path) -> None:
    for named in (True, False):

        def tune(writer: gguf.GGUFWriter, named: bool = named) -> None:
            if named:
                writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
            else:
                writer.add_tensor("rope_factors_long.weight", np.ones(8, np.float32))

        write(tmp_path / "tiny.gguf", "llama", tune=tune)
        with pytest.raises(ModelError, match=r"'longrope' are not read for llama"):
            model_folder(tmp_path / "tiny.gguf", tmp_path / f"cache {named}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gemma_s_norms_are_those_of_its_folder_to_the_bit(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """The file has 1 + w in float32, for which a type of two bytes has no room."""
    model = write(tmp_path / "tiny.gguf", "gemma2", dtype=dtype, **_AS_CONVERTED["gemma2"])
    model.to(dtype).save_pretrained(tmp_path / "folder")  # type: ignore[arg-type]
    found = []
    for folder in (tmp_path / "folder", model_folder(tmp_path, tmp_path / "cache")):
        config = load_config(folder)
        assert config.norm_offset == 1
        with open_folder(folder, config, StageSpec(str(folder)), dtype) as (source, _):
            shapes = {n: s for n, s in all_shapes(config).items() if n.endswith("norm.weight")}
            found.append({name: source.read(name, shape) for name, shape in shapes.items()})
    ours, theirs = found[1], found[0]
    assert len(theirs) > 4
    for name, weight_H in theirs.items():
        assert weight_H.dtype == ours[name].dtype == dtype
        assert torch.equal(ours[name], weight_H), name


def config_read(path: Path, variant: str, **options: Any) -> dict[str, Any]:
    write(path, variant, **options)
    with closing(GgufFile(path)) as file:
        return config_of(file)


def test_phi3_without_scaled_positions_says_their_original_number_too(tmp_path: Path) -> None:
    """As every file of it does that llama.cpp has written."""
    found = config_read(
        tmp_path / "tiny.gguf", "phi3", tune=lambda w: w.add_rope_scaling_orig_ctx_len(256)
    )
    assert found["rope_parameters"]["rope_type"] == "default"


def test_an_unknown_key_that_says_nothing_is_not_refused(tmp_path: Path) -> None:
    """Converters write keys of parts that a model lacks, such as Qwen3-Coder's shared expert."""
    path = tmp_path / "tiny.gguf"
    config_read(
        path, "qwen3-moe", mlp_only_layers=[],
        tune=lambda w: w.add_expert_shared_feed_forward_length(0),
    )  # fmt: skip
    cases: tuple[Callable[[gguf.GGUFWriter], None], ...] = (
        lambda w: w.add_expert_shared_feed_forward_length(32),
        lambda w: w.add_causal_attention(False),
        lambda w: w.add_attention_scale(1.0),
    )
    for tune in cases:
        with pytest.raises(ModelError, match=r"key qwen3moe\..* is not known to Qwen3Moe"):
            config_read(path, "qwen3-moe", mlp_only_layers=[], tune=tune)


def test_a_model_of_embeddings_may_say_how_it_pools(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    for pooling in (gguf.PoolingType.NONE, gguf.PoolingType.MEAN, gguf.PoolingType.LAST):
        config_read(path, "qwen3", tune=lambda w, pooling=pooling: w.add_pooling_type(pooling))
    with pytest.raises(ModelError, match=r"qwen3\.pooling_type is neither"):
        config_read(path, "qwen3", tune=lambda w: w.add_pooling_type(gguf.PoolingType.RANK))


Stored = Callable[[Kind], tuple[Path, list[list[int]]]]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """The folder of a kind and its answers: blocks of 256 features ask for sizes to match; so do
    two ranks that cut no block."""

    @functools.cache
    def make(kind: Kind) -> tuple[Path, list[list[int]]]:
        path = tmp_path_factory.mktemp("stored")
        sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
        model = write(path / "tiny.gguf", "llama", kind, **sizes)
        return model_folder(path / "tiny.gguf", path / "cache"), answers(model)

    return make


KINDS = [Kind.Q8_0, Kind.Q4_0, Kind.TQ2_0, Kind.Q4_K, Kind.Q3_K, Kind.IQ4_NL]
# What is turned into floats at load reaches the CPU library as Q4_K does.
LONG = [pytest.param(kind, "cpu", marks=pytest.mark.long) for kind in KINDS[4:]]
SHORT = [*((kind, "torch") for kind in KINDS), *((kind, "cpu") for kind in KINDS[:4])]


@pytest.mark.parametrize(("kind", "backend"), [*SHORT, *LONG])
def test_stored_kinds(stored: Stored, ranks: RankPool, kind: Kind, backend: str) -> None:
    skip_unless_available(backend)
    folder, expected = stored(kind)
    config, spec = load_config(folder), StageSpec(str(folder))
    with open_folder(folder, config, spec, torch.float32) as (_, packed):
        stays = packed is not None and "model.layers.1.mlp.down_proj" in packed
    assert stays == (kind in (Kind.Q8_0, Kind.Q4_0, Kind.TQ2_0, Kind.IQ4_NL))
    # What is floats once loaded is cut as any are: whole, and over ranks and stages at once.
    for num_stages in (1, 2) if stays else (1,):
        chain = make_chain(folder, num_stages, backend=backend, dtype="float32")
        planner = MiniPlanner(chain, feeds=num_stages > 1)
        assert planner.run(make_prompts(LENGTHS), GREEDY) == expected
    for num_stages in (1, 2) if stays else (2,):
        ranks.make(folder, num_stages, backend=backend, dtype="float32")
        planner = MiniPlanner(ranks.execute, feeds=num_stages > 1)
        assert planner.run(make_prompts(LENGTHS), GREEDY) == expected


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16])
def test_floats_of_two_bytes(tmp_path: Path, kind: Kind) -> None:
    model = write(tmp_path / "tiny.gguf", "qwen2", kind)
    folder = model_folder(tmp_path, tmp_path / "cache")
    chain = make_chain(folder, dtype="float32")
    assert MiniPlanner(chain).run(make_prompts(LENGTHS), GREEDY) == answers(model)
    wanted = {Kind.F16: "float16", Kind.BF16: "bfloat16"}[kind]
    assert StageRunner(StageSpec(str(folder), backend="torch")).info.dtype == wanted


def test_ranks_may_cut_a_block(tmp_path: Path, ranks: RankPool) -> None:
    """96 inner features are three blocks, so a rank's half is not whole ones."""
    model = write(tmp_path / "tiny.gguf", "qwen3-moe", Kind.Q8_0, mlp_only_layers=[])
    folder = model_folder(tmp_path, tmp_path / "cache")
    ranks.make(folder, dtype="float32")
    assert MiniPlanner(ranks.execute).run(make_prompts(LENGTHS), GREEDY) == answers(model)


def test_transformers_reads_the_same_from_the_file(tmp_path: Path) -> None:
    write(tmp_path / "tiny.gguf", "llama", Kind.Q8_0)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="tiny.gguf", dtype=torch.float32
    )
    folder = model_folder(tmp_path, tmp_path / "cache")
    chain = make_chain(folder, dtype="float32")
    assert MiniPlanner(chain).run(make_prompts(LENGTHS), GREEDY) == answers(theirs)


def test_a_folder_of_a_file(tmp_path: Path) -> None:
    """Its tokenizer, ends and chat template are the file's; it is made once, and anew for a file
    that has changed."""
    write(tmp_path / "tiny.gguf", "qwen2", Kind.Q8_0)
    cache = tmp_path / "cache"
    folder = model_folder(tmp_path / "tiny.gguf", cache)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode("the <|im_end|>")
    assert ids[1:] == [
        *tokenizer.convert_tokens_to_ids(["e", "\u0120"]),
        tiny_models.TURN_END_TOKEN_ID,
    ]
    assert tokenizer.convert_ids_to_tokens(ids[0]) == "th"
    assert tokenizer.decode(ids) == "the <|im_end|>"
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert rendered == "<|im_start|>x<|im_end|>"
    info = StageRunner(StageSpec(str(folder), backend="torch")).info
    assert info.eos_token_ids == (tiny_models.EOS_TOKEN_ID, tiny_models.TURN_END_TOKEN_ID)
    assert "Qwen2ForCausalLM" in check_folder(folder)
    assert "gguf (Q8_0)" in check_folder(folder)
    assert model_folder(tmp_path / "tiny.gguf", cache) == folder == model_folder(folder, cache)
    write(tmp_path / "tiny.gguf", "qwen2", Kind.Q4_0)
    assert model_folder(tmp_path, cache) != folder
    assert sorted(p.name for p in (cache / "gguf").iterdir() if p.name.startswith(".")) == []


def refused(path: Path, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        check_folder(model_folder(path, path.parent / "cache"))


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    refused(tmp_path / "none.gguf", "none.gguf cannot be read")
    cases: tuple[tuple[Callable[[gguf.GGUFWriter], None], str], ...] = (
        (lambda w: w.add_uint32("llama.magic", 3), r"tiny.gguf: key llama.magic \(3\)"),
        (
            lambda w: w.add_uint16("split.count", 2),
            "tiny.gguf is in 2 parts, and tiny-00002-of-00002.gguf is missing beside it",
        ),
        (lambda w: w.add_sliding_window(9), "sliding_window 9 may change"),
        (
            lambda w: w.add_tensor("blk.0.odd.weight", np.zeros((4, 32), np.float32)),
            "unexpected tensor blk.0.odd.weight",
        ),
        (
            lambda w: w.add_tensor(
                "blk.0.odd.weight",
                np.zeros((4, 36), np.uint8),
                raw_dtype=Kind.NVFP4,
            ),
            "blk.0.odd.weight is of type NVFP4, which cannot be read; supported: F32",
        ),
    )  # fmt: skip
    for tune, message in cases:
        write(path, "llama", tune=tune)
        refused(path, message)
    write(path, "llama", num_key_value_heads=1)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"general.architecture", b"general.architectur_"))
    refused(path, "architecture None is not supported in a GGUF file; supported: llama")
    path.write_bytes(whole)
    write(tmp_path / "other.gguf", "llama")
    refused(tmp_path, r"several GGUF files \(other.gguf, tiny.gguf\)")


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write(path, "llama", num_hidden_layers=1)
    whole = path.read_bytes()
    for end in [*range(0, 4096, 61), *range(4096, len(whole), 9973), len(whole) - 1]:
        path.write_bytes(whole[:end])
        refused(path, "tiny.gguf")
