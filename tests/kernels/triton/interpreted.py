"""Triton's interpreter, made to compute as a GPU does where tests compare bits."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from triton.runtime import interpreter


def multiply_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products as tensor cores compute them: a row whatever its place. The interpreter's own are
    those of numpy's library, where the place decides how a sum is split."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return

    def create_dot(builder: Any, a: Any, b: Any, d: Any, precision: Any, most: Any) -> Any:
        left, right = a.data.astype(np.float32), b.data.astype(np.float32)
        product = np.zeros_like(d.data)
        with np.errstate(invalid="ignore"):
            for k in range(left.shape[1]):
                product += left[:, k : k + 1] * right[k : k + 1]
        return interpreter.TensorHandle(d.data + product, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
