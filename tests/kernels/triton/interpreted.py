"""Triton's interpreter, made to compute as a GPU does where tests compare bits."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter


def multiply_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products as tensor cores compute them: a row whatever its place. The interpreter's own are
    those of numpy's library, where the place decides how a sum is split."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return

    def numbers(operand: Any) -> Any:
        if operand.dtype.scalar != tl.float8e4nv:
            return operand.data
        codes = torch.from_numpy(operand.data.view(np.uint8))
        return codes.view(torch.float8_e4m3fn).float().numpy()

    def create_dot(builder: Any, a: Any, b: Any, d: Any, precision: Any, most: Any) -> Any:
        left, right = (numbers(operand).astype(d.data.dtype) for operand in (a, b))
        product = np.zeros_like(d.data)
        with np.errstate(invalid="ignore"):
            for k in range(left.shape[1]):
                product += left[:, k : k + 1] * right[k : k + 1]
        return interpreter.TensorHandle(d.data + product, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def fuse_multiply_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums and differences of a product take it unrounded, as a GPU's fused multiply-adds do."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    builder = interpreter.InterpreterBuilder
    multiply, subtract, add = builder.create_fmul, builder.create_fsub, builder.create_fadd

    def create_fmul(self: Any, a: Any, b: Any) -> Any:
        product = multiply(self, a, b)
        if product.data.dtype == np.float32:
            product.unrounded = a.data.astype(np.float64) * b.data.astype(np.float64)
        return product

    def fused(plain: Any, operation: Any) -> Any:
        def create(self: Any, a: Any, b: Any) -> Any:
            left, right = getattr(a, "unrounded", a.data), getattr(b, "unrounded", b.data)
            if left is a.data and right is b.data:
                return plain(self, a, b)
            return interpreter.TensorHandle(operation(left, right).astype(np.float32), a.dtype)

        return create

    monkeypatch.setattr(builder, "create_fmul", create_fmul)
    monkeypatch.setattr(builder, "create_fsub", fused(subtract, np.subtract))
    monkeypatch.setattr(builder, "create_fadd", fused(add, np.add))
