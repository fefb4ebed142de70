"""LoRA adapters in the stages: tokens as of weights that peft has merged, several in a batch."""

from __future__ import annotations

import json
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.scheduling.plan import RequestStart, StepPlan
from actors.stage.models.config import ModelError
from actors.stage.runner import StageRunner
from kernels.adapters import AdapterModule
from kernels.torch.backend import TorchBackend
from tests import tiny_adapters
from tests.actors.stage.greedy_reference import (
    GREEDY,
    expected,
    make_prompts,
    skip_unless_available,
)
from tests.actors.stage.mini_planner import Execute, MiniPlanner, chain, make_runner
from tests.actors.stage.rank_pool import RankPool

SLOTS = {"max_adapters": 3, "max_adapter_rank": 10}
# Of each of the seven prompts: none, or which of the three adapters.
WANTED = (0, 1, 2, 3, 1, 0, 2)
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"r": 9, "use_rslora": True, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    {"r": 2, "lora_alpha": 1, "layers_to_transform": [1], "target_modules": ["o_proj", "up_proj"]},
)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [
        tiny_adapters.write(folder / str(n), seed=n, **config) for n, config in enumerate(SETTINGS)
    ]


def answers(adapters: list[Path]) -> list[list[int]]:
    """What every prompt is answered with the adapter that it wants."""
    each = [expected("llama"), *map(tiny_adapters.expected, adapters)]
    return [each[adapter][number] for number, adapter in enumerate(WANTED)]


def runners(folder: Path, adapters: list[Path], num_stages: int = 1, **spec: Any) -> Execute:
    made = [
        make_runner(folder, num_stages=num_stages, stage=stage, **SLOTS, **spec)
        for stage in range(num_stages)
    ]
    for runner in made:
        for slot, adapter in enumerate(adapters):
            runner.load_adapter(slot, adapter)
    return chain(made)


def test_the_adapters_differ(adapters: list[Path]) -> None:
    each = [expected("llama"), *map(tiny_adapters.expected, adapters)]
    assert len({str(tokens) for tokens in each}) == 4


@pytest.mark.parametrize(
    ("backend", "num_stages", "chunk"),
    [("torch", 1, 16), ("torch", 2, 7), ("cpu", 1, 3), ("cpu", 2, 7)],
)
def test_several_in_a_batch(
    tiny_model: Callable[..., Path],
    adapters: list[Path],
    backend: str,
    num_stages: int,
    chunk: int,
) -> None:
    skip_unless_available(backend)
    execute = runners(tiny_model("llama"), adapters, num_stages, backend=backend)
    planner = MiniPlanner(execute, chunk=chunk, feeds=num_stages > 1)
    assert planner.run(make_prompts(), GREEDY, adapters=WANTED) == answers(adapters)
    assert planner.num_hybrid_steps > 3


def test_kernels_are_prepared_before_the_first_adapter(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[AdapterModule] = []
    monkeypatch.setattr(TorchBackend, "prepare_adapters", lambda _, module: prepared.append(module))
    make_runner(tiny_model("llama"))
    assert not prepared
    make_runner(tiny_model("llama"), **SLOTS)
    num_parts = [len(module.widths) for module in prepared]
    assert num_parts == [3, 1, 2, 1] * 3  # of three layers


def test_a_preempted_request_keeps_its_adapter(
    tiny_model: Callable[..., Path], adapters: list[Path]
) -> None:
    skip_unless_available("cpu")
    planner = MiniPlanner(runners(tiny_model("llama"), adapters, backend="cpu"), num_blocks=26)
    assert planner.run(make_prompts(), GREEDY, adapters=WANTED) == answers(adapters)
    assert planner.num_preemptions > 0


@pytest.mark.parametrize(("backend", "num_stages"), [("torch", 1), ("cpu", 1), ("cpu", 2)])
def test_two_ranks(
    ranks: RankPool,
    tiny_model: Callable[..., Path],
    adapters: list[Path],
    backend: str,
    num_stages: int,
) -> None:
    skip_unless_available(backend)
    ranks.make(tiny_model("llama"), num_stages, backend=backend, **SLOTS)
    for slot, adapter in enumerate(adapters):
        ranks.load_adapter(slot, adapter)
    planner = MiniPlanner(ranks.execute, feeds=num_stages > 1)
    assert planner.run(make_prompts(), GREEDY, adapters=WANTED) == answers(adapters)


# Fused tensors and a turned order of features, biases, parallel layers, groups, stored transposed,
# norms of results; a mixture, whose attention alone an adapter may change.
@pytest.mark.parametrize(
    ("variant", "modules"),
    [
        ("phi3", ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]),
        ("qwen2", list(tiny_adapters.LLAMA_MODULES)),
        ("cohere2", list(tiny_adapters.LLAMA_MODULES)),
        ("falcon-40b", ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]),
        ("gpt2", ["c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"]),
        ("gemma3", list(tiny_adapters.LLAMA_MODULES)),
        pytest.param(  # k_proj is of values too
            "gemma4-unified", list(tiny_adapters.LLAMA_MODULES), marks=pytest.mark.long
        ),
        ("gemma3-images", list(tiny_adapters.LLAMA_MODULES)),  # some are the vision tower's too
        ("qwen3-moe", ["q_proj", "k_proj", "v_proj", "o_proj"]),
        ("youtu", ["q_a_proj", "kv_a_proj_with_mqa", "o_proj", "down_proj"]),
    ],
)
def test_other_families(
    tiny_model: Callable[..., Path], tmp_path: Path, variant: str, modules: list[str]
) -> None:
    skip_unless_available("cpu")
    adapter = tiny_adapters.write(tmp_path / "adapter", variant, target_modules=modules)
    plain, merged = expected(variant), tiny_adapters.expected(adapter, variant)
    assert plain != merged
    for backend in ("torch", "cpu"):
        runner = make_runner(tiny_model(variant), backend=backend, **SLOTS)
        runner.load_adapter(1, adapter)
        found = MiniPlanner(chain([runner])).run(
            make_prompts(), GREEDY, adapters=[0 if n % 3 == 0 else 2 for n in range(7)]
        )
        assert found == [plain[n] if n % 3 == 0 else merged[n] for n in range(7)], backend


def test_a_slot_is_used_again(tiny_model: Callable[..., Path], adapters: list[Path]) -> None:
    """What the adapter before changed and the next one does not is as of the base model."""
    runner = make_runner(tiny_model("llama"), backend="torch", **SLOTS)
    planner = MiniPlanner(chain([runner]))
    for adapter in adapters:
        runner.load_adapter(0, adapter)
        found = planner.run(make_prompts(), GREEDY, adapters=[1] * 7)
        assert found == tiny_adapters.expected(adapter)
        planner = MiniPlanner(chain([runner]))


def test_large_adapters_load_in_pieces(
    tiny_model: Callable[..., Path], adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.stage.adapters._PIECE_BYTES", 1)
    for num_stages in (1, 2):
        execute = runners(tiny_model("llama"), adapters, num_stages, backend="torch")
        planner = MiniPlanner(execute, feeds=num_stages > 1)
        assert planner.run(make_prompts(), GREEDY, adapters=WANTED) == answers(adapters)


def test_a_load_beside_steps_takes_what_they_leave_and_ends(
    tiny_model: Callable[..., Path], adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps follow each other without a pause while it loads; beside steps that leave no time
    nothing does."""
    monkeypatch.setattr("actors.stage.adapters._PIECE_BYTES", 1)
    runner = make_runner(tiny_model("llama"), backend="torch", **SLOTS)
    loads = Counter[int]()
    put = AdapterModule.put
    step_id = 0

    def counted(module: AdapterModule, *args: Any) -> None:
        loads[step_id] += 1
        put(module, *args)

    monkeypatch.setattr(AdapterModule, "put", counted)
    prompt = make_prompts()[0]
    start = RequestStart(0, tuple(prompt), len(prompt), tuple(range(32)), GREEDY)
    slices = ((0, 0, len(prompt), True),)
    runner.execute(StepPlan(0, slices, started=(start,)), None)
    monkeypatch.setattr("actors.stage.load_pace.IDLE_S", 600.0)  # it never is
    thread = threading.Thread(target=runner.load_adapter, args=(0, adapters[0]))
    thread.start()
    while thread.is_alive():
        step_id += 1
        adapter_load_s = 1e-4 if step_id > 100 else 0.0
        runner.execute(StepPlan(step_id, slices, adapter_load_s=adapter_load_s), None)
    assert sum(n for step, n in loads.items() if step <= 100) == 0
    assert sum(loads.values()) == 7 * 3 * 4  # projections, layers, ranks
    assert len(loads) > 5
    monkeypatch.undo()
    found = MiniPlanner(chain([runner])).run(make_prompts(), GREEDY, adapters=[1] * 7)
    assert found == tiny_adapters.expected(adapters[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_bits_do_not_depend_on_the_company(
    tiny_model: Callable[..., Path], adapters: list[Path], dtype: str
) -> None:
    """Log-probabilities of a request alone, and beside others with and without adapters."""
    skip_unless_available("cpu")
    asked = replace(GREEDY, logprobs=5)
    execute = runners(tiny_model("llama"), adapters, backend="cpu", dtype=dtype)

    def bits(prompts: list[list[int]], wanted: tuple[int, ...]) -> list[list[Any]]:
        planner = MiniPlanner(execute, chunk=16 if len(prompts) > 1 else 5)
        planner.run(prompts, asked, adapters=wanted)
        found: list[list[Any]] = [[] for _ in prompts]
        for result in planner.results:
            for request_id, row in result.logprobs:
                found[request_id].append(row)
        return found

    prompts = make_prompts()
    together = bits(prompts, WANTED)
    for number, wanted in enumerate(WANTED):
        assert bits([prompts[number]], (wanted,))[0] == together[number]


# ---- folders ----------------------------------------------------------------------------------


def edited(source: Path, target: Path, **keys: Any) -> Path:
    shutil.copytree(source, target)
    path = target / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))
    return target


@pytest.fixture(scope="module")
def runner(tiny_model: Callable[..., Path]) -> StageRunner:
    return make_runner(tiny_model("llama"), **SLOTS)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not LORA"),
        ({"task_type": "SEQ_CLS"}, "task_type 'SEQ_CLS'"),
        ({"use_dora": True}, "use_dora is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is not supported"),
        ({"bias": "all"}, "bias 'all' is not supported"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is not supported"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is not supported"),
        ({"something_new": 1}, "something_new is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' changes the base"),
        ({"r": 11}, "r 11 is above adapters.max_rank, 10"),
        ({"r": 0}, "r 0 is not a rank"),
        ({"r": "4"}, "r '4' is not a number"),
        ({"lora_alpha": None}, "lora_alpha None is not a number"),
        ({"r": 5}, "has shape"),
    ],
)
def test_refused_configs(
    runner: StageRunner, adapters: list[Path], tmp_path: Path, keys: dict[str, Any], words: str
) -> None:
    folder = edited(adapters[0], tmp_path / "adapter", **keys)
    with pytest.raises(ModelError, match=words) as refused:
        runner.load_adapter(0, folder)
    assert str(folder) in str(refused.value)


@pytest.mark.parametrize("start", [True, False, "gaussian", "eva", "orthogonal", "mica"])
def test_starts_that_leave_the_base_model_as_it_is(
    tiny_model: Callable[..., Path], runner: StageRunner, tmp_path: Path, start: bool | str
) -> None:
    """With the keys that peft writes beside each."""
    adapter = tiny_adapters.write(tmp_path / "adapter", init_lora_weights=start)
    runner.load_adapter(0, adapter)


NAME = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(NAME), "missing"),
        (lambda t: t.update({NAME: t[NAME][:, :-1].contiguous()}), "has shape"),
        (lambda t: t[NAME].fill_(torch.nan), "not finite"),
        (
            lambda t: t.update({NAME.replace("layers.1", "layers.7"): t.pop(NAME)}),
            "no linear layer",
        ),
        (lambda t: t.update({"base_model.model.lm_head.lora_A.weight": t.pop(NAME)}), "no linear"),
        (lambda t: t.clear(), "holds no tensors"),
    ],
)
def test_refused_tensors(
    runner: StageRunner,
    adapters: list[Path],
    tmp_path: Path,
    change: Callable[[dict[str, torch.Tensor]], object],
    words: str,
) -> None:
    folder = edited(adapters[0], tmp_path / "adapter")
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(ModelError, match=words):
        runner.load_adapter(0, folder)


def test_refused_folders(runner: StageRunner, adapters: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"adapter folder .* is missing"):
        runner.load_adapter(0, tmp_path / "nowhere")
    pickled = edited(adapters[0], tmp_path / "pickled")
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    with pytest.raises(ModelError, match="is a pickle"):
        runner.load_adapter(0, pickled)
    with pytest.raises(ValueError, match="adapter slot 3 of 3"):
        runner.load_adapter(3, adapters[0])
