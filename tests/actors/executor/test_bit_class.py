"""Engines of one bit class round alike: what it tells apart, and what it does not."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import actors.executor.bit_class as module
from actors.executor.bit_class import bit_class_of
from actors.fleet.snapshot import BitClass
from actors.stage.spec import StageSpec
from tests.actors.executor.paper_ranks import info


def folder(path: Path, size: int = 300_000) -> StageSpec:
    """A model of two files of weights."""
    path.mkdir(parents=True)
    (path / "config.json").write_text('{"hidden_size": 8}')
    for number in (1, 2):
        data = bytes((i * number) % 251 for i in range(size))
        (path / f"model-{number}.safetensors").write_bytes(data)
    return StageSpec(str(path))


def class_of(spec: StageSpec, **report: Any) -> BitClass:
    return asyncio.run(bit_class_of(spec, info(**report)))


def differences(one: BitClass, other: BitClass) -> list[str]:
    return [
        field.name
        for field in fields(BitClass)
        if getattr(one, field.name) != getattr(other, field.name)
    ]


def test_a_copy_elsewhere_is_of_the_same_class(tmp_path: Path) -> None:
    one, other = folder(tmp_path / "a" / "name"), folder(tmp_path / "b" / "name")
    os.utime(Path(other.model_path) / "config.json", (0, 0))
    assert class_of(one) == class_of(other)
    # Neither where it runs nor how its work is cut changes a bit.
    divided = replace(one, num_stages=2, stage=1, max_requests=3, num_threads=7)
    assert class_of(divided, available_bytes=5, kv_block_bytes=7) == class_of(one)


@pytest.mark.parametrize(
    "change",
    [
        {"quantization": "int8"},
        {"kv_dtype": "fp8"},
        {"tensor_ranks": 2},
        {"load_format": "dummy"},
    ],
)
def test_another_computation_is_another_class(tmp_path: Path, change: dict[str, Any]) -> None:
    spec = folder(tmp_path / "m")
    assert class_of(replace(spec, **change)) != class_of(spec)


@pytest.mark.parametrize(
    "report",
    [
        {"dtype": "bfloat16"},
        {"backend": "torch"},
        {"instruction_set": "avx2"},
        {"draw_version": 2},
    ],
)
def test_a_rank_that_rounds_otherwise_is_of_another_class(
    tmp_path: Path, report: dict[str, Any]
) -> None:
    spec = folder(tmp_path / "m")
    (differing,) = differences(class_of(spec, **report), class_of(spec))
    assert differing in {*report, "draw"}


@pytest.mark.parametrize(
    ("backend", "invariant"), [("cpu", True), ("torch", False), ("triton", False)]
)
def test_a_class_says_whether_the_batch_changes_its_bits(
    tmp_path: Path, backend: str, invariant: bool
) -> None:
    assert class_of(folder(tmp_path / "m"), backend=backend).batch_invariant == invariant


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "edit",
    [
        lambda path: flip(path / "config.json", 3),
        lambda path: flip(path / "model-1.safetensors", 0),
        lambda path: flip(path / "model-2.safetensors", 150_000),
        lambda path: (path / "model-2.safetensors").write_bytes(b"0" * 300_000),
        lambda path: (path / "model-2.safetensors").rename(path / "model-3.safetensors"),
        lambda path: (path / "model-2.safetensors").unlink(),
        lambda path: (path / "more.gguf").write_bytes(b""),
    ],
)
def test_other_weights_are_another_class(tmp_path: Path, edit: Callable[[Path], None]) -> None:
    spec = folder(tmp_path / "m")
    before = class_of(spec)
    edit(Path(spec.model_path))
    assert differences(class_of(spec), before) == ["model"]
    assert class_of(spec).model.startswith("m-")


def test_weights_that_are_drawn_differ_by_their_seed_alone(tmp_path: Path) -> None:
    spec = replace(folder(tmp_path / "m"), load_format="dummy")
    before = class_of(spec)
    assert class_of(replace(spec, seed=1)) != before
    flip(Path(spec.model_path) / "model-1.safetensors", 0)  # is not read
    assert class_of(spec) == before


def test_weights_are_read_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which shows meanwhile that the scheduler is alive."""
    readers: list[threading.Thread] = []
    read = module._weights_of

    def weights_of(spec: StageSpec) -> str:
        readers.append(threading.current_thread())
        return read(spec)

    monkeypatch.setattr(module, "_weights_of", weights_of)
    class_of(folder(tmp_path / "m"))
    assert len(readers) == 1
    assert readers[0] is not threading.current_thread()
