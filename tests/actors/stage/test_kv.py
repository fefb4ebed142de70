"""The KV cache's memory of the host."""

from __future__ import annotations

import pytest
import torch

from actors.stage.kv import KVCache
from kernels.interface import AttentionShape
from kernels.torch.backend import TorchBackend

SHAPE = AttentionShape(4, 2, 16, 0.25)


def test_host_memory_that_is_not_there_is_refused_by_its_setting() -> None:
    most = 1 << 40  # blocks: above what any machine lends
    with pytest.raises(ValueError, match=r"^kv\.swap_gib: .*allocate"):
        KVCache(TorchBackend(), 2, 3, most, 4, SHAPE, torch.float32, torch.device("cpu"))
