"""Blocks of GGUF files mean what ggml's own package says."""

from __future__ import annotations

import tracemalloc

import gguf
import numpy as np
import pytest
import torch

from kernels.ggml_blocks import BLOCK_TYPES, as_quantized, dequantize

Kind = gguf.GGMLQuantizationType
PACKED = (Kind.Q8_0, Kind.Q4_0, Kind.Q5_0, Kind.IQ4_NL, Kind.TQ1_0, Kind.TQ2_0)


@pytest.mark.parametrize("code", BLOCK_TYPES)
def test_blocks_mean_what_ggml_says(code: int) -> None:
    """Drawn bytes, so that every bit of a block is met; scales that are not numbers are not."""
    kind, theirs = BLOCK_TYPES[code], Kind(code)
    assert kind.name == theirs.name
    assert gguf.GGML_QUANT_SIZES[theirs] == (kind.features, kind.num_bytes)
    raw = np.random.default_rng(code).integers(0, 256, (64, 4 * kind.num_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        ours, expected = dequantize(raw, kind), gguf.dequantize(raw, theirs)
    np.testing.assert_array_equal(ours, expected)
    packed = as_quantized(raw, kind)
    assert (packed is not None) == (theirs in PACKED)
    if packed is not None:
        np.testing.assert_array_equal(packed.dequantize(torch.float32).numpy(), expected)


@pytest.mark.parametrize("code", BLOCK_TYPES)
def test_decoding_takes_few_copies_of_the_floats(code: int) -> None:
    kind, num_rows, width = BLOCK_TYPES[code], 256, 1024
    raw = np.zeros((num_rows, width // kind.features * kind.num_bytes), np.uint8)
    dequantize(raw[:1], kind)  # fills what is kept between calls
    tracemalloc.start()
    dequantize(raw, kind)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 4 * num_rows * width * np.float32(0).nbytes
