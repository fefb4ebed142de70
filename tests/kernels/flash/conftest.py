"""Kernels run in Triton's interpreter, without the work that it repeats."""

from __future__ import annotations

from tests import swift_interpreter

swift_interpreter.install()
