"""Grids of vectors, whole; the blocks that name them are tested with all others."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import quants

from kernels.ggml_grids import _grid, fields


@pytest.mark.parametrize("name", ["IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"])
def test_grids_are_ggml_s(name: str) -> None:
    theirs = getattr(quants, name)
    theirs.init_grid()
    np.testing.assert_array_equal(_grid(name), theirs.grid.reshape(theirs.grid_shape))


def test_fields_of_a_number_follow_one_another() -> None:
    words = np.array([[0x4321, 0x8765]], np.uint16)
    found = fields(words, (0, 4, 8, 12), 7)
    assert found.dtype == np.uint16
    assert found.tolist() == [[[1, 2, 3, 4], [5, 6, 7, 0]]]
