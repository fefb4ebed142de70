"""What is no number stays none: a request whose values overflow ends by that, instead of going on
with a key that attention has silently left out."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu.library import Isa
from tests.kernels.cpu.batches import EACH_SET, instruction_set
from tests.kernels.cpu.sequences import DTYPES, make

pytestmark = EACH_SET


@pytest.fixture(autouse=True)
def _isa(isa: Isa):  # type: ignore[no-untyped-def]
    with instruction_set(isa):
        yield


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [*((dtype, None) for dtype in DTYPES), (torch.bfloat16, torch.int8)],
    ids=str,
)  # fmt: skip
def test_a_key_that_is_none_reaches_all_later_tokens(
    dtype: torch.dtype, kv_dtype: torch.dtype | None, softcap: float | None
) -> None:
    sequences = make([40], (2, 1, 64), dtype, softcap=softcap, kv_dtype=kv_dtype)
    sequences.k[0][5, 0, 3] = float("nan")
    (out,) = sequences.run([(0, 0, 40)])
    assert not out[:5].isnan().any()
    assert out[5:].isnan().all(dim=1).all()


def test_a_number_that_is_none_makes_its_whole_head_none_in_an_int8_cache() -> None:
    """Wherever it stands among larger and smaller ones."""
    sequences = make([4], (2, 1, 64), torch.bfloat16, kv_dtype=torch.int8)
    for lane, value in ((0, 100.0), (16, float("nan")), (32, 1.0)):
        sequences.v[0][1, 0, lane] = value
    (out,) = sequences.run([(0, 0, 4)])
    assert out[1:].isnan().all(dim=1).all()
