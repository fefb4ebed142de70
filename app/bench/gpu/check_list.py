"""The checks of one backend, in the order in which the bench runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from app.bench.gpu import checks
from app.bench.gpu import product_checks as products
from app.bench.gpu.adapter_checks import FULL_ADAPTERS, SMALL_ADAPTERS, check_adapters
from app.bench.gpu.hybrid_checks import check_one_launch, shares_launch
from app.bench.gpu.recurrence_checks import (
    FULL_RECURRENCES,
    SMALL_RECURRENCES,
    check_recurrence,
)
from app.bench.gpu.reduce_checks import check_reduce_norm
from app.bench.gpu.worker import cuda_answers
from app.bench.report import MeasurementError
from kernels.interface import Backend
from kernels.quantized import FLOAT8_ROUNDING

# A title, and what may raise anything in a kernel's first run; returns a row, or yields several.
Check = tuple[str, Callable[[], Any]]


def run_all(
    add: Callable[[Any], None],
    listed: Iterable[Check],
    is_sound: Callable[[], bool] = cuda_answers,
) -> None:
    """Add the rows of all, whichever raise, for as long as the GPU answers. Raises MeasurementError
    at the end: what was raised, by how many, and how many were not run."""
    raised: dict[str, list[str]] = {}
    left = iter(listed)
    for title, check in left:
        try:
            found = check()
            for row in found if isinstance(found, Iterator) else (found,):
                add(row)
        except Exception as error:  # of any kind, by a kernel's first run
            raised.setdefault(f"{type(error).__name__}: {error}", []).append(title)
            if not is_sound():
                break
    if raised:
        told = [f"{titles[0]} (of {len(titles)}): {error}" for error, titles in raised.items()]
        not_run = [title for title, _ in left]
        if not_run:
            told.append(f"not run: {not_run[0]} (of {len(not_run)})")
        raise MeasurementError("; ".join(told))


def parts_of(name: str) -> tuple[str, ...]:
    """What is checked of a backend, each part in a section of its own: one that ruins the GPU's
    state, or never ends, costs no other."""
    return tuple(_PARTS) if name == "triton" else ("attention",)


def list_checks(part: str, backend: Backend, device: torch.device) -> Iterator[Check]:
    """Small and full cases in bfloat16, small ones in float32 too."""
    for dtype in (torch.bfloat16, torch.float32):
        yield from _PARTS[part](backend, dtype, device)


def _of_attention(backend: Backend, dtype: torch.dtype, device: torch.device) -> Iterator[Check]:
    for case in _attention_cases(backend, dtype):
        title = f"attention, {case.name}"
        yield title, partial(checks.check_attention, case, backend, dtype, device)


def _of_one_launch(backend: Backend, dtype: torch.dtype, device: torch.device) -> Iterator[Check]:
    for case in _attention_cases(backend, dtype):
        if shares_launch(case, dtype):
            title = f"attention, {case.name}, one launch"
            yield title, partial(check_one_launch, case, dtype, device)


def _attention_cases(backend: Backend, dtype: torch.dtype) -> Iterator[checks.AttentionCase]:
    for case in checks.SMALL_CASES + (checks.FULL_CASES if dtype == torch.bfloat16 else ()):
        if case.float8 and "fp8" not in backend.kv_dtypes:
            continue
        if not backend.unsupported(dtype, case.block_size):
            yield case


def _of_layers(backend: Backend, dtype: torch.dtype, device: torch.device) -> Iterator[Check]:
    is_full = dtype == torch.bfloat16
    for case in checks.SMALL_CASES:
        with_norm = case.pad is None
        yield (
            f"rope, {case.name}",
            partial(checks.check_rope, case, backend, dtype, device, with_norm),
        )
    for size in ((1, 4096), (300, 4096), (7, 14_336)):
        check = partial(checks.check_elementwise, backend, dtype, device, *size)
        yield f"elementwise, {size}", check
    for mixture in checks.SMALL_EXPERTS + (checks.FULL_EXPERTS if is_full else ()):
        title = f"experts, {mixture.name}"
        yield title, partial(checks.check_experts, mixture, backend, dtype, device)


def _of_adapters(backend: Backend, dtype: torch.dtype, device: torch.device) -> Iterator[Check]:
    is_full = dtype == torch.bfloat16
    for adapted in SMALL_ADAPTERS + (FULL_ADAPTERS if is_full else ()):
        title = f"adapters, {adapted.name}"
        yield title, partial(check_adapters, adapted, backend, dtype, device)


def _of_states(backend: Backend, dtype: torch.dtype, device: torch.device) -> Iterator[Check]:
    is_full = dtype == torch.bfloat16
    for case in SMALL_RECURRENCES + (FULL_RECURRENCES if is_full else ()):
        title = f"recurrence, {case.name}"
        yield title, partial(check_recurrence, case, backend, dtype, device)


def _of_sums(backend: Backend, dtype: torch.dtype, device: torch.device) -> Iterator[Check]:
    for num_ranks, tokens, width in ((2, 32, 4096), (8, 16, 8192), (3, 5, 1000)):
        sizes = (num_ranks, tokens, width)
        yield f"sums of ranks, {sizes}", partial(check_reduce_norm, backend, dtype, device, *sizes)


def _of_products(backend: Backend, dtype: torch.dtype, device: torch.device) -> Iterator[Check]:
    features = (4096, 1024)
    rounds_float8 = not backend.unsupported_quantization(FLOAT8_ROUNDING)
    for tokens in (1, 16, 64, 300):
        given = (dtype, device, tokens, features)
        for biased in (False, True):
            yield f"linear, {tokens} tokens", partial(products.check_dense, *given, biased)
        yield f"linear, packed, {tokens} tokens", partial(products.check_quantized, *given)
        for stored in products.STORED_CASES:
            title = f"linear, {stored.name}, {tokens} tokens"
            yield title, partial(products.check_stored, stored, *given)
        for rounded in products.ROUNDED_CASES:
            if rounds_float8 or not rounded.float8:
                title = f"linear, {rounded.name}, {tokens} tokens"
                yield title, partial(products.check_rounded, rounded, *given)


# In the order of what a server needs first.
_PARTS = {
    "attention": _of_attention,
    "layers": _of_layers,
    "products": _of_products,
    "one launch": _of_one_launch,
    "adapters": _of_adapters,
    "states": _of_states,
    "sums of ranks": _of_sums,
}
