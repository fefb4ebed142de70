"""Sampling on the CPU in C++ (src/sampling.cpp), with the semantics of `kernels.torch.sampling`.

Tokens are the same, except that top_p and min_p may keep or drop a token whose probability is
within float rounding of the bound. A row's token does not depend on other rows. Rows run on the
library's threads; nothing is sorted."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.cpu import library
from kernels.cpu.library import Pointer
from kernels.sampling import Adjustment, SamplingRows

_INT64 = ctypes.c_int64


class _AdjustmentView(ctypes.Structure):
    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("prompt", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("bias_ids", ctypes.c_void_p),
        ("biases", ctypes.c_void_p),
        ("forbidden", ctypes.c_void_p),
        ("allowed", ctypes.c_void_p),
        ("num_prompt", ctypes.c_int64),
        ("num_output", ctypes.c_int64),
        ("num_biases", ctypes.c_int64),
        ("num_forbidden", ctypes.c_int64),
        ("repetition", ctypes.c_float),
        ("presence", ctypes.c_double),
        ("frequency", ctypes.c_double),
    )


@functools.cache
def _function(name: str) -> Any:
    signatures: dict[str, tuple[Any, ...]] = {
        "sample": (Pointer, _INT64, _INT64, _INT64, *[Pointer] * 7),
        "gumbel_argmax": (Pointer, *[_INT64] * 3, *[Pointer] * 3, _INT64, Pointer, Pointer),
        "adjust": (Pointer, _INT64, _INT64),
        "chosen_logprobs": (Pointer, *[_INT64] * 3, Pointer, _INT64, *[Pointer] * 4),
    }
    return library.function(f"legato_{name}", None, *signatures[name])


def sample(logits_SV: torch.Tensor, rows: SamplingRows) -> NDArray[np.int64]:
    """One token id per row of adjusted float32 logits, which are left as they are; -1 where one is
    NaN or the highest is not finite."""
    _check_logits(logits_SV)
    num_rows, vocabulary = logits_SV.shape
    columns = _columns(
        num_rows,
        (rows.temperature_S, np.float32),
        (rows.top_k_S, np.int32),
        (rows.top_p_S, np.float32),
        (rows.min_p_S, np.float32),
        (rows.seed_S, np.int64),
        (rows.position_S, np.int64),
    )
    tokens_S = np.empty(num_rows, np.int64)
    _function("sample")(
        logits_SV.data_ptr(),
        num_rows,
        vocabulary,
        logits_SV.stride(0),
        *[column.ctypes.data for column in columns],
        tokens_S.ctypes.data,
    )
    return tokens_S


def gumbel_argmax(
    logits_SV: torch.Tensor, rows: SamplingRows, first_id: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """`kernels.torch.sampling.gumbel_argmax`: Gumbel-max over a vocabulary shard."""
    _check_logits(logits_SV)
    num_rows, vocabulary = logits_SV.shape
    columns = _columns(
        num_rows,
        (rows.temperature_S, np.float32),
        (rows.seed_S, np.int64),
        (rows.position_S, np.int64),
    )
    scores_S, tokens_S = np.empty(num_rows, np.float64), np.empty(num_rows, np.int64)
    _function("gumbel_argmax")(
        logits_SV.data_ptr(),
        num_rows,
        vocabulary,
        logits_SV.stride(0),
        *[column.ctypes.data for column in columns],
        first_id,
        scores_S.ctypes.data,
        tokens_S.ctypes.data,
    )
    return scores_S, tokens_S


def _columns(num_rows: int, *columns: tuple[NDArray[Any], Any]) -> list[NDArray[Any]]:
    for values, _ in columns:
        if values.shape != (num_rows,):
            raise ValueError(f"a column of {values.shape} for {num_rows} rows")
    return [np.ascontiguousarray(values, dtype=dtype) for values, dtype in columns]


def adjust(logits_SV: torch.Tensor, adjustments: Sequence[Adjustment]) -> None:
    """Apply penalties, biases and masks in place to float32 logits; at most one per row.

    Token ids must be within the vocabulary. Raises IndexError for a row out of range, ValueError
    for two adjustments of one row."""
    if not adjustments:
        return
    _check_logits(logits_SV)
    num_rows, vocabulary = logits_SV.shape
    if len({a.row for a in adjustments}) < len(adjustments):
        raise ValueError("two adjustments of one row")
    kept: list[object] = []  # what the addresses below point into

    def address(values: Sequence[float] | NDArray[np.int32], dtype: Any) -> int:
        array = np.ascontiguousarray(values, dtype=dtype)
        kept.append(array)
        return int(array.ctypes.data)

    views = (_AdjustmentView * len(adjustments))()
    for view, a in zip(views, adjustments, strict=True):
        if not 0 <= a.row < num_rows:
            raise IndexError(f"row {a.row} of logits with {num_rows}")
        view.logits = logits_SV.data_ptr() + a.row * logits_SV.stride(0) * 4
        if a.repetition_penalty != 1.0:
            view.prompt, view.num_prompt = address(a.prompt, np.int32), len(a.prompt)
        view.output, view.num_output = address(a.output, np.int32), len(a.output)
        if a.bias:
            view.bias_ids = address([token for token, _ in a.bias], np.int64)
            view.biases = address([bias for _, bias in a.bias], np.float32)
            view.num_biases = len(a.bias)
        if a.forbidden:
            view.forbidden = address(a.forbidden, np.int64)
            view.num_forbidden = len(a.forbidden)
        if a.allowed_W is not None:
            if a.allowed_W.dtype != torch.int32 or a.allowed_W.numel() < -(-vocabulary // 32):
                raise ValueError(f"allowed_W must be {-(-vocabulary // 32)} int32 words")
            allowed_W = a.allowed_W.contiguous()
            kept.append(allowed_W)
            view.allowed = allowed_W.data_ptr()
        view.repetition = a.repetition_penalty
        view.presence = a.presence_penalty
        view.frequency = a.frequency_penalty
    _function("adjust")(ctypes.addressof(views), len(adjustments), vocabulary)


def chosen_logprobs(
    logits_RV: torch.Tensor, tokens_R: torch.Tensor, num_top: int
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]:
    """As in `kernels.torch.sampling`: log-probability and rank of each row's token, and the num_top
    likeliest with their ids (lower ids first among equals)."""
    _check_logits(logits_RV)
    num_rows, vocabulary = logits_RV.shape
    num_top = min(num_top, vocabulary)
    if tokens_R.shape != (num_rows,):
        raise ValueError(f"{tuple(tokens_R.shape)} tokens for {num_rows} rows")
    chosen_R = np.ascontiguousarray(tokens_R.numpy(), dtype=np.int64)
    if num_rows and not (chosen_R.min() >= 0 and chosen_R.max() < vocabulary):
        raise IndexError(f"tokens outside a vocabulary of {vocabulary}")
    logprob_R, rank_R = np.empty(num_rows, np.float32), np.empty(num_rows, np.int64)
    top_RK = np.empty((num_rows, num_top), np.float32)
    ids_RK = np.empty((num_rows, num_top), np.int64)
    _function("chosen_logprobs")(
        logits_RV.data_ptr(),
        num_rows,
        vocabulary,
        logits_RV.stride(0),
        chosen_R.ctypes.data,
        num_top,
        *(out.ctypes.data for out in (logprob_R, rank_R, top_RK, ids_RK)),
    )
    return logprob_R, rank_R, top_RK, ids_RK


def _check_logits(logits_SV: torch.Tensor) -> None:
    if logits_SV.dtype != torch.float32 or logits_SV.dim() != 2 or logits_SV.device.type != "cpu":
        raise ValueError("logits must be a float32 matrix on the CPU")
    if logits_SV.shape[1] == 0 or logits_SV.stride(1) != 1:
        raise ValueError("logits must have contiguous rows of at least one token")
