"""Model folders: what is read, what is refused, and that the message names the cause."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.stage.models.config import ModelError
from actors.stage.runner import StageRunner
from actors.stage.spec import StageInfo, StageSpec
from actors.stage.weights.checkpoint import Checkpoint
from actors.stage.weights.source import DummySource, Shard
from tests.actors.stage.greedy_reference import GREEDY, expected, make_prompts
from tests.actors.stage.mini_planner import MiniPlanner, make_chain

Edit = Callable[[Path], object]


def load(folder: Path, **spec: Any) -> StageInfo:
    return StageRunner(StageSpec(str(folder), backend="torch", **spec)).info


@pytest.fixture
def folder(tiny_model: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of the tiny Llama to break."""
    return shutil.copytree(tiny_model("llama"), tmp_path / "model")


@pytest.fixture
def sharded(tiny_model: Callable[..., Path], tmp_path: Path) -> Path:
    return shutil.copytree(tiny_model("llama", num_shards=3), tmp_path / "sharded")


def configure(folder: Path, **entries: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **entries}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    edit(tensors)
    save_file(tensors, path)


def test_sharded_equals_single(sharded: Path) -> None:
    assert len(list(sharded.glob("*.safetensors"))) >= 3
    planner = MiniPlanner(make_chain(sharded, 2), feeds=True)
    assert planner.run(make_prompts(), GREEDY) == expected("llama")


def test_info(tiny_model: Callable[..., Path]) -> None:
    info = load(tiny_model("llama-tied", dtype=torch.bfloat16), block_size=8, max_model_len=999)
    assert (info.hidden_size, info.vocab_size, info.max_model_len) == (64, 263, 256)
    assert (info.dtype, info.backend) == ("bfloat16", "torch")
    assert info.eos_token_ids == (256, 257)
    assert (
        info.kv_block_bytes == 3 * 2 * 8 * 2 * 16 * 2
    )  # layers, k and v, tokens, heads, dim, bf16
    per_layer = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64 + 2 * 64
    assert info.num_parameters == 263 * 64 + 64 + 3 * per_layer
    assert info.available_bytes > 0


def test_progress_rises_to_one(folder: Path) -> None:
    seen: list[float] = []
    StageRunner(StageSpec(str(folder), backend="torch"), seen.append)
    assert seen == sorted(seen)
    assert len(seen) == 5
    assert seen[-1] == 1.0


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _garbage(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not a tensor in sight" * 100)


def _pickles(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"pickle")


def _poison(folder: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")

    edit_tensors(folder, edit)


def _reshape(folder: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(64, 95)

    edit_tensors(folder, edit)


Q_PROJ = "model.layers.2.self_attn.q_proj.weight"

BROKEN: dict[str, tuple[Edit, str]] = {
    "no folder": (shutil.rmtree, r"model folder .*model does not exist"),
    "no config": (lambda f: (f / "config.json").unlink(), r"config\.json is missing"),
    "config is no JSON": (
        lambda f: (f / "config.json").write_text("{broken"),
        r"config\.json is not readable JSON",
    ),
    "config lacks a key": (
        lambda f: configure(f, hidden_size=...),
        r"config\.json lacks the key 'hidden_size'",
    ),
    "nonsense size": (lambda f: configure(f, hidden_size="wide"), r"config\.json: .*'wide'"),
    "negative size": (lambda f: configure(f, vocab_size=-1), r"vocab_size must be positive"),
    "unknown architecture": (
        lambda f: configure(f, architectures=["MambaForCausalLM"]),
        r"MambaForCausalLM is not supported; supported: LlamaForCausalLM, .*Qwen3ForCausalLM",
    ),
    "no architecture": (lambda f: configure(f, architectures=None), r"\(none named\)"),
    "remote code": (
        lambda f: configure(f, architectures=["EvilModel"], auto_map={"AutoModel": "evil.Model"}),
        r"EvilModel is not supported and its code \(auto_map\) is not run; supported: Llama",
    ),
    "other activation": (lambda f: configure(f, hidden_act="snake"), r"hidden_act 'snake'"),
    "option of another family": (
        lambda f: configure(f, attn_logit_softcapping=30.0),
        r"attn_logit_softcapping 30\.0 may change .* LlamaForCausalLM is not known to have it",
    ),
    "other rope": (
        lambda f: configure(f, rope_parameters={"rope_type": "spiral", "rope_theta": 1.0}),
        r"rope type 'spiral' is not supported; supported: default",
    ),
    "heads do not group": (
        lambda f: configure(f, num_key_value_heads=3),
        r"4 heads cannot share 3 key/value heads",
    ),
    "quantized in a foreign way": (
        lambda f: configure(f, quantization_config={"quant_method": "bitsandbytes"}),
        r"quant_method 'bitsandbytes' is not supported; supported: awq, compressed-tensors, ",
    ),
    "no weights": (
        lambda f: (f / "model.safetensors").unlink(),
        r"model folder .*model holds no \*\.safetensors",
    ),
    "pickled weights": (_pickles, r"pytorch_model\.bin is a pickle"),
    "truncated": (_truncate, r"model\.safetensors is corrupt or truncated"),
    "garbage": (_garbage, r"model\.safetensors is corrupt or truncated"),
    "empty file": (
        lambda f: (f / "model.safetensors").write_bytes(b""),
        r"model\.safetensors is corrupt or truncated",
    ),
    "a pointer": (
        lambda f: (f / "model.safetensors").write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:0a\nsize 9\n"
        ),
        r"model\.safetensors is only Git LFS's pointer to it: `git lfs pull`",
    ),
    "missing tensor": (
        lambda f: edit_tensors(f, lambda t: t.pop(Q_PROJ)),
        rf"tensor {Q_PROJ} is missing from .*model\.safetensors",
    ),
    "unexpected tensor": (
        lambda f: edit_tensors(f, lambda t: t.update({"model.extra": torch.ones(2)})),
        r"model\.safetensors: unexpected tensor model\.extra",
    ),
    "wrong shape": (
        _reshape,
        r"model\.safetensors: tensor .*down_proj\.weight has shape \(64, 95\), .* \(64, 96\)",
    ),
    "not a number": (_poison, r"up_proj\.weight holds values that are not finite"),
    "integers": (
        lambda f: edit_tensors(
            f, lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int32)})
        ),
        r"model\.norm\.weight holds torch\.int32, not a float type",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folder(folder: Path, case: str) -> None:
    edit, message = BROKEN[case]
    edit(folder)
    with pytest.raises(ModelError, match=message):
        load(folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read every file")
def test_weights_of_another_user_are_not_called_corrupt(folder: Path) -> None:
    (folder / "model.safetensors").chmod(0)
    with pytest.raises(ModelError, match=r"model\.safetensors may not be read by this user"):
        load(folder)


def test_missing_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=f"weight file .*{shard.name} is missing"):
        load(sharded)


def test_index_that_lies(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name, shard = next(iter(index["weight_map"].items()))
    other = next(s for s in index["weight_map"].values() if s != shard)
    index["weight_map"][name] = other
    path.write_text(json.dumps(index))
    with pytest.raises(ModelError, match=rf"index\.json lists {name} in {other}: it is not there"):
        load(sharded)


@pytest.mark.parametrize("shard", ["../elsewhere.safetensors", "/etc/passwd"])
def test_index_that_leaves_the_folder(sharded: Path, shard: str) -> None:
    path = sharded / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"lm_head.weight": shard}}))
    with pytest.raises(ModelError, match="points outside the folder"):
        load(sharded)


def test_a_stage_checks_what_it_does_not_need(folder: Path) -> None:
    """The whole folder is checked at once, whichever layers a stage reads."""
    edit_tensors(folder, lambda t: t.pop("model.layers.0.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.up_proj"):
        load(folder, stage=1, num_stages=2)


def test_old_buffers_are_ignored(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(folder, lambda t: t.update({name: torch.ones(8)}))
    assert load(folder).num_parameters > 0


def test_code_of_the_folder_is_not_run(folder: Path) -> None:
    """An architecture that is known here loads without it."""
    configure(folder, auto_map={"AutoModelForCausalLM": "evil.Model"})
    (folder / "evil.py").write_text("raise SystemExit")
    assert MiniPlanner(make_chain(folder)).run(make_prompts(), GREEDY) == expected("llama")


@pytest.mark.parametrize("variant", ["gpt2", "qwen3", "mixtral"])
def test_tensors_may_lack_the_model_s_name(
    variant: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """As GPT-2's, which have buffers among them, and those of Qwen3-Embedding."""
    folder = shutil.copytree(tiny_model(variant), tmp_path / "model")
    prefix = "transformer." if variant == "gpt2" else "model."
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    save_file({**bare, "h.0.attn.bias": torch.ones(1, 1, 8, 8)}, folder / "model.safetensors")
    assert MiniPlanner(make_chain(folder)).run(make_prompts(), GREEDY) == expected(variant)


def test_unknown_options(folder: Path) -> None:
    with pytest.raises(ModelError, match="load_format 'magic' is unknown; known: auto, dummy"):
        load(folder, load_format="magic")
    with pytest.raises(ModelError, match="dtype 'float8' is not supported"):
        load(folder, dtype="float8")
    with pytest.raises(ModelError, match="3 layers cannot fill 4 pipeline stages"):
        load(folder, num_stages=4)


def test_what_crosses_to_a_gpu_is_what_is_stored(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are checked and converted where they will be, not on the way."""
    crossed: list[int] = []
    to = torch.Tensor.to

    def noted(self: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        made = to(self, *arguments, **options)
        if made.device != self.device:
            crossed.append(self.nbytes)
        return made

    monkeypatch.setattr(torch.Tensor, "to", noted)
    monkeypatch.setattr(torch, "isfinite", lambda x: torch.tensor(x.device.type == "meta"))
    meta, name = torch.device("meta"), "model.layers.0.mlp.up_proj.weight"
    checkpoint = Checkpoint(folder, torch.bfloat16, device=meta)
    shape = checkpoint.shape_of(name)
    read = checkpoint.read(name, shape, Shard(rows=(0, 4)))
    assert (read.device, read.dtype, read.shape) == (meta, torch.bfloat16, (4, shape[1]))
    assert crossed == [4 * shape[1] * 4]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_draws_the_same_numbers_for_every_part() -> None:
    source = DummySource(1, torch.bfloat16, torch.device("cuda"))
    whole, again = (source.read("a.weight", (64, 32)) for _ in range(2))
    assert torch.equal(whole, again)
    assert torch.equal(source.read("a.weight", (64, 32), Shard(rows=(8, 16))), whole[8:16])
    assert not torch.equal(source.read("b.weight", (64, 32)), whole)
    assert whole.float().std().item() == pytest.approx(0.02, rel=0.1)


def test_dummy_weights_do_not_depend_on_the_split(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """From config.json alone; another seed is another model."""
    for name in ("config.json", "generation_config.json"):
        shutil.copy(tiny_model("llama") / name, tmp_path)
    whole = MiniPlanner(make_chain(tmp_path, load_format="dummy", seed=3))
    answer = whole.run(make_prompts(), GREEDY)
    staged = MiniPlanner(make_chain(tmp_path, 3, load_format="dummy", seed=3), feeds=True)
    assert staged.run(make_prompts(), GREEDY) == answer
    other = MiniPlanner(make_chain(tmp_path, load_format="dummy", seed=4))
    assert other.run(make_prompts(), GREEDY) != answer
