"""Kernels run in Triton's interpreter, without what it repeats, on models of two layers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import swift_interpreter
from tests.gpu.two_layers import LAYERS

swift_interpreter.install()


@pytest.fixture(scope="session")
def tiny_model(tiny_model: Callable[..., Path]) -> Callable[..., Path]:
    return functools.partial(tiny_model, num_hidden_layers=LAYERS)
