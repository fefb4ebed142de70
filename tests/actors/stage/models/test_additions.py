"""Layers whose heads differ: whose caches they attend to, and what is normed of the values."""

from __future__ import annotations

import pytest
import torch

from actors.stage.models.additions import (
    LayerAdditions,
    cached,
    caches_of,
    norm_values,
)
from actors.stage.models.mixers import ShortConvMixer
from kernels.interface import AttentionShape, KVLayer
from kernels.layer_weights import LayerWeights
from kernels.torch.backend import TorchBackend


def layer(source: int, has_cache: bool = True, ones: torch.Tensor | None = None) -> LayerAdditions:
    return LayerAdditions(2, 8, source, has_cache, ones, None, None, None, None)


def test_a_layer_attends_to_its_own_cache_or_that_of_one_before() -> None:
    additions = [layer(0), None, layer(0, False), layer(3), layer(3, False), layer(0, False)]
    shapes = [AttentionShape(4, 2, 8 * (number + 1), 1.0) for number in range(6)]
    layers = [LayerWeights(*[None] * 6) for _ in additions]  # type: ignore[arg-type]
    assert cached(shapes, layers, additions) == [shapes[0], shapes[1], shapes[3]]
    layers[1].mixer = ShortConvMixer(TorchBackend(), torch.zeros(3, 8), None, torch.float32)
    assert cached(shapes, layers, additions) == [shapes[0], shapes[3]]
    caches: list[KVLayer] = ["first", "second", "third"]
    wanted = ["first", "second", "first", "third", "third", "first"]
    assert caches_of(additions, caches) == wanted


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_heads_of_values_are_normed_and_nothing_else(num_tokens: int) -> None:
    torch.manual_seed(0)
    qkv_TX = torch.randn(num_tokens, 8 * 8)
    before = qkv_TX.clone()
    found = norm_values(qkv_TX, layer(0, ones=torch.ones(8)), TorchBackend(), 1e-6)
    assert torch.equal(found[:, :48], before[:, :48])
    values = before[:, 48:].view(num_tokens, 2, 8)
    expected = values / (values.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(found[:, 48:].view(num_tokens, 2, 8), expected)
    assert norm_values(before, layer(0), TorchBackend(), 1e-6) is before
