"""How many variants of each kernel a server compiles.

`python -m tests.kernels.triton.kernel_variants` puts batches of many sizes through the launchers,
kernels not interpreted and not run, and prints JSON.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch

from app.bench.gpu import checks
from app.bench.gpu.adapter_checks import AdapterCase, check_adapters
from app.bench.gpu.checks import AttentionCase, ExpertCase
from app.bench.gpu.recurrence_checks import RecurrenceCase, recurrence_inputs, run_recurrence
from app.bench.gpu.reduce_checks import draw, make_ranks
from kernels.recurrence import Recurrence
from kernels.sampling import Adjustment
from kernels.triton import blocks, logits, sampling
from kernels.triton.backend import TritonBackend
from kernels.triton.cache import allocate
from kernels.triton.compile import noting_variants

HEADS = (4, 2, 64)
DECODES = (((0, 1),), ((15, 1), (3, 1)), ((700, 1),) * 16, ((99, 1),) * 33)
HYBRIDS = (((0, 7),), ((300, 16),), ((5, 1), (0, 300)), ((9, 1),) * 16 + ((16, 64), (0, 1)))


def main() -> None:
    backend, device, dtype = TritonBackend(), torch.device("cpu"), torch.bfloat16
    with noting_variants(90) as variants:
        for slices in DECODES + HYBRIDS:
            for pad in (None, (3, 3), (30, 0)):
                if pad is not None and pad[0] != pad[1] and slices in DECODES:
                    continue
                case = AttentionCase("", HEADS, 16, slices, pad=pad)
                q_TND, batch, cache = checks.attention_inputs(case, backend, dtype, device)
                for way in (TritonBackend(one_launch=False), TritonBackend(one_launch=True)):
                    way.attention(q_TND, batch, cache, case.shape)
                for _ in checks.check_rope(case, backend, dtype, device, False):
                    pass
        for tokens in (1, 2, 16, 33, 300):
            mixture = ExpertCase("", tokens, (4, 2, 64, 32))
            checks.check_experts(mixture, backend, dtype, device)
        [mine, _] = make_ranks(2, 33, 4096, dtype, device)
        for tokens in (1, 2, 16, 33):
            (part_TH, _), residual_TH, weight_H = draw(2, tokens, 4096, dtype, device)
            backend.reduce_add_rms_norm(part_TH, residual_TH, weight_H, 1e-5, mine)
        form = Recurrence(num_key_heads=2, num_heads=4, key_dim=16, value_dim=16, delta=True)
        for recurrent in (
            RecurrenceCase("", form, (1,)),
            RecurrenceCase("", form, (1, 2), pad=(5, 3)),
            RecurrenceCase("", form, (1,) * 16),
            RecurrenceCase("", form, (70,), pad=(0, 3)),
            RecurrenceCase("", form, (1, 2, 200), pad=(53, 16)),
            RecurrenceCase("", form, (1, 2, 200), pad=(53, 16), saves=(1, 0, 70)),
        ):
            run_recurrence(recurrent, recurrence_inputs(recurrent, dtype, device), backend)
        dense = backend.pack_linear(torch.zeros(64, 256, dtype=dtype), None)
        for tokens in (1, 2, 8, 16):
            dense(torch.zeros(tokens, 256, dtype=dtype))
        for slots in ((0,), (0, 1, 2), (0,) * 33, (0, -1, 2) * 20):
            # Ranks that read 1, 1 and 3 blocks of A's rows.
            adapted = AdapterCase("", slots, (8, 16, 40), 40, 64, (64, 32))
            check_adapters(adapted, backend, dtype, device)
        nothing = np.zeros(0, dtype=np.int32)
        for vocabulary, num_rows in ((32_000, 1), (32_000, 2), (32_000, 16), (32_000, 17)):
            mask_W = torch.ones(vocabulary // 32, dtype=torch.int32)
            rows = [
                Adjustment(i, nothing, nothing, ((3, 1.0),), allowed_W=mask_W)
                for i in range(num_rows)
            ]
            logits.adjust(torch.zeros(num_rows + 1, vocabulary), rows)
            packed = torch.zeros(num_rows, 3, dtype=torch.float64)
            sampling.sample_rows(torch.zeros(num_rows, vocabulary), packed)
        layers = allocate(2, 20, 16, AttentionCase("", HEADS, 16, ()).shape, dtype, device)
        for number in (1, 2, 16, 17):
            blocks.copy_blocks(layers, [(0, i + 1) for i in range(number)])
            blocks.read_blocks(layers, range(number), list(torch.zeros(number, 2, 2, 16, 2, 64)))
        warmed = {name: len(found) for name, found in variants.items()}
        logits.warm(device)
    counts = {name: len(found) for name, found in variants.items()}
    sys.stdout.write(json.dumps({"variants": counts, "before_warming": warmed}))


if __name__ == "__main__":
    main()
