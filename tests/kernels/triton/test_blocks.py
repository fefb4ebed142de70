"""Blocks of all layers move as a loop over layers would move them, by one launch."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: its kernels cannot be tested")
# Set by tests/conftest.py where there is no GPU.
ON_GPU = os.environ.get("TRITON_INTERPRET") != "1"

from kernels.interface import AttentionShape  # noqa: E402
from kernels.triton import blocks, cache  # noqa: E402
from kernels.triton.backend import TritonBackend  # noqa: E402
from kernels.triton.cache import PagedKV  # noqa: E402
from tests.kernels.triton.waits import refusing_waits  # noqa: E402

DEVICE = torch.device("cuda" if ON_GPU else "cpu")
LAYERS, NUM_BLOCKS = 3, 7
# The last has an odd number of bytes.
FORMATS = [
    (16, AttentionShape(2, 2, 8, 1.0), torch.float16),
    (4, AttentionShape(2, 1, 64, 1.0), cache.FLOAT8),
    (3, AttentionShape(1, 1, 5, 1.0), cache.FLOAT8),
]


@pytest.fixture(params=FORMATS, ids=["float16", "float8", "odd bytes"])
def layers(request: pytest.FixtureRequest) -> list[PagedKV]:
    block_size, shape, dtype = request.param
    made = cache.allocate(LAYERS, NUM_BLOCKS, block_size, shape, dtype, DEVICE)
    for layer in made:
        for stored in (layer.keys, layer.values):
            stored.copy_(torch.randint(1, 100, stored.shape))
    return made


def contents(layers: list[PagedKV]) -> list[torch.Tensor]:
    return [part.cpu().clone() for layer in layers for part in (layer.keys, layer.values)]


@pytest.mark.parametrize(
    "pairs",
    [[(0, 1), (2, 3)], [(0, 1), (1, 2)], [(0, 1), (2, 0)], [(3, 1), (4, 1)], []],
    ids=["apart", "a chain", "a source is replaced", "twice", "none"],
)
def test_copies_are_in_order(layers: list[PagedKV], pairs: list[tuple[int, int]]) -> None:
    expected = contents(layers)
    for part in expected:
        for source, target in pairs:
            part[target] = part[source]
    blocks.copy_blocks(layers, pairs)
    for ours, theirs in zip(contents(layers), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_blocks_travel_to_the_host_and_back(layers: list[PagedKV]) -> None:
    before = contents(layers)
    like = cache.read_block(layers[0], 0)
    places = torch.zeros(2, LAYERS, *like.shape, dtype=like.dtype, pin_memory=ON_GPU)
    blocks.read_blocks(layers, [5, 2], [places[1], places[0]])
    if ON_GPU:
        torch.cuda.synchronize()
    for number, layer in enumerate(layers):
        assert torch.equal(places[1, number], cache.read_block(layer, 5))
        assert torch.equal(places[0, number], cache.read_block(layer, 2))
    blocks.write_blocks(layers, [0, 6], [places[1], places[0]])
    for part in before:
        part[0], part[6] = part[5], part[2]
    for ours, theirs in zip(contents(layers), before, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("num_layers", [1, 4])
def test_moves_wait_for_nothing_and_launch_alike_for_all_layers_and_blocks(
    monkeypatch: pytest.MonkeyPatch, num_layers: int
) -> None:
    grids: list[tuple[int, ...]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Kernel:
            grids.append(grid)
            return self

        def __call__(self, *arguments: object, **constants: object) -> None: ...

    monkeypatch.setattr(blocks, "_move_kernel", Kernel())
    backend, shape = TritonBackend(), AttentionShape(2, 2, 8, 1.0)
    made = backend.allocate_kv(num_layers, 9, 16, shape, torch.float16, torch.device("cpu"))
    places = torch.zeros(3, num_layers, 2, 16, 2, 8, dtype=torch.float16)
    with refusing_waits():
        backend.copy_blocks(made, [(0, 1), (2, 3), (4, 5)])
        backend.read_blocks(made, [1, 2, 3], list(places))
        backend.write_blocks(made, [1, 2, 3], list(places))
    assert grids == [(3, 2 * num_layers)] * 3
