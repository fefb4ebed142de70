"""Inputs of layers beside the embedding, as transformers' Gemma 4 computes them."""

from __future__ import annotations

import pytest
import torch
import transformers

from actors.stage.models.embedding import LayerInputs, look_up
from actors.transport.group import RankGroup
from kernels.torch.backend import TorchBackend


def test_inputs_of_layers() -> None:
    config = transformers.Gemma4TextConfig(
        vocab_size=40, vocab_size_per_layer_input=40, hidden_size=24, intermediate_size=8,
        num_hidden_layers=3, num_attention_heads=1, num_key_value_heads=1, head_dim=8,
        global_head_dim=8, hidden_size_per_layer_input=12,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Gemma4TextModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
        tokens = torch.tensor([3, 39, 0, 3])
        x = model.embed_tokens(tokens[None])
        rows = model.get_per_layer_inputs(tokens[None])
        expected = model.project_per_layer_inputs(x, rows)[0].flatten(1)
        backend = TorchBackend()
        inputs = LayerInputs(
            table_VX=model.embed_tokens_per_layer.weight,
            scale=12**0.5,
            projection=backend.pack_linear(model.per_layer_model_projection.weight, None),
            projection_scale=24**-0.5,
            norm_P=model.per_layer_projection_norm.weight,
            vocab_start=0,
        )
        found = inputs.join(tokens, x[0], RankGroup(), backend, config.rms_norm_eps)
    assert torch.equal(found[:, :24], x[0])
    torch.testing.assert_close(found[:, 24:], expected)


def test_a_rank_looks_up_its_part_of_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one has only zeros."""
    group = RankGroup()
    monkeypatch.setattr(group, "size", 2)
    monkeypatch.setattr(group, "all_reduce", lambda x: x)
    table, tokens = torch.randn(5, 3), torch.tensor([9, 5, 4, 0])
    found = look_up(tokens, table, 5, group)
    assert torch.equal(found, torch.stack((table[4], table[0], torch.zeros(3), torch.zeros(3))))
