"""What config.json files of mixtures like DeepSeek-V3's say, and which combinations are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors.stage.models.config import ModelError
from kernels.layer_form import Routing
from tests.actors.stage.models.published_mixtures import described


def test_glm_4_5(tmp_path: Path) -> None:
    found = described(tmp_path, "GLM-4.5")
    assert found.expert_layers == (False, True, True, True)
    assert (found.num_experts, found.expert_size, found.shared_expert_size) == (8, 32, 32)
    assert found.routing == Routing("sigmoid", least_sum=1e-20, scale=2.5)
    assert found.names.stored_prefixes == (("model.layers.4.", None),)
    assert (found.qk_norm, found.ropes[0].dim, found.ropes[0].interleaved) == ("head", 8, False)


def test_k_exaone(tmp_path: Path) -> None:
    found = described(tmp_path, "K-EXAONE")
    assert found.sliding_windows == (64, 64, 64, None)
    assert [rope.dim for rope in found.ropes] == [16, 16, 16, 0]
    assert found.expert_layers == (False, True, True, True)
    plain = described(tmp_path, "K-EXAONE", sliding_window=None)
    assert [rope.dim for rope in plain.ropes] == [16] * 4
    for changed, said in (
        ({"is_moe_layer": [True] * 4}, "must agree on 4 layers"),
        ({"mlp_layer_types": ["sparse"]}, "must name dense or sparse 4x"),
    ):
        with pytest.raises(ModelError, match=said):
            described(tmp_path, "K-EXAONE", **changed)
    with pytest.raises(ModelError, match="layer_types must name"):
        described(tmp_path, "K-EXAONE", layer_types=None)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"n_group": 3}, "n_group 3, topk_group 1 do not fit 8 experts"),
        ({"n_group": 8}, "n_group 8, topk_group 1 do not fit 8 experts"),
        ({"topk_group": 2}, "n_group 1, topk_group 2 do not fit 8 experts"),
        ({"n_group": 4, "num_experts_per_tok": 3}, "num_experts_per_tok 3 is more than the"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ({"topk_method": "greedy"}, "topk_method 'greedy' is not supported"),
    ],
)
def test_routing_that_is_not_known_is_refused(
    tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        described(tmp_path, "GLM-4.5", **changed)
