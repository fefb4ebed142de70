"""The interpreter without repeated work: it gives and refuses what Triton's own functions do."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import triton.language as tl
from triton.language.semantic import IncompatibleTypeErrorImpl, TritonSemantic
from triton.runtime import interpreter

from tests import swift_interpreter

pytestmark = pytest.mark.skipif(
    not swift_interpreter.fits(), reason="kernels are compiled, or by another release of Triton"
)
SWIFT: Any = interpreter.interpreter_semantic
NAMES = ("int1", "int8", "uint8", "int32", "uint32", "int64", "float8e4nv", "bfloat16",
         "float16", "float32", "float64")  # fmt: skip
SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (4,), (8,), (2, 1), (1, 4), (2, 4), (4, 2))


@pytest.fixture
def plain() -> Any:
    """As `SWIFT` was: what is replaced is replaced in that object."""
    return TritonSemantic(interpreter.interpreter_builder)


def outcome(function: Callable[..., Any], *arguments: Any) -> Any:
    """What it returns, or what it refuses the arguments with."""
    try:
        return function(*arguments)
    except (IncompatibleTypeErrorImpl, TypeError, ValueError) as refused:
        return type(refused), str(refused)


def test_the_type_in_common(plain: Any) -> None:
    types = [getattr(tl, name) for name in NAMES]
    flags = (False, True)
    seen = []
    for case in itertools.product(types, flags, types, flags, flags):
        wanted = outcome(plain.computation_type_impl, *case)
        for _ in range(2):  # the second is remembered
            assert outcome(SWIFT.computation_type_impl, *case) == wanted
        seen.append(isinstance(wanted, tl.dtype))
    assert any(seen)
    assert not all(seen)  # some have no type in common


def block(shape: tuple[int, ...], dtype: Any) -> Any:
    data = np.arange(math.prod(shape)).reshape(shape or (1,))
    data = data.astype(interpreter._get_np_dtype(dtype))
    kind = tl.block_type(dtype, list(shape)) if shape else dtype
    return tl.tensor(interpreter.TensorHandle(data, dtype), kind)


def described(value: Any) -> Any:
    if not isinstance(value, tl.tensor):
        return value
    sizes = [size.value for size in value.shape]
    return sizes, value.numel.value, str(value.type), value.dtype, value.handle.data.tolist()


def test_broadcast(plain: Any) -> None:
    refused = []
    for left, right in itertools.product(SHAPES, SHAPES):
        operands = block(left, tl.int32), block(right, tl.int32)
        wanted = outcome(plain.broadcast_impl_value, *operands)
        given = outcome(SWIFT.broadcast_impl_value, *operands)
        assert list(map(described, given)) == list(map(described, wanted)), (left, right)
        if not isinstance(wanted[0], tl.tensor):
            refused.append((left, right))
    assert ((4,), (8,)) in refused
    assert ((2, 4), (4, 2)) in refused
    assert ((2, 1), (1, 4)) not in refused


def test_casts_keep_what_has_the_type_already(plain: Any) -> None:
    value = block((4,), tl.int32)
    assert SWIFT._cast_to_computation_type(value, tl.int32) is value
    other = SWIFT._cast_to_computation_type(value, tl.float32)
    assert described(other) == described(plain._cast_to_computation_type(value, tl.float32))
    for refused in ((-1, tl.uint8), (300, tl.int8)):
        wanted = outcome(plain._cast_to_computation_type, *refused)
        assert wanted[0] is ValueError
        assert outcome(SWIFT._cast_to_computation_type, *refused) == wanted


def test_operands(plain: Any) -> None:
    pointers = [tl.pointer_type(tl.int32), tl.pointer_type(tl.float32)]
    types = [tl.int1, tl.int32, tl.uint32, tl.int64, tl.float16, tl.float32, *pointers]
    shapes = [(), (4,)]
    values = [*itertools.starmap(block, itertools.product(shapes, types)), 3, -3, 0.5]
    checks = itertools.product((False, True), repeat=4)
    for lhs, rhs, flags in itertools.product(values, values, checks):
        wanted = outcome(plain.binary_op_type_checking_impl, lhs, rhs, *flags)
        given = outcome(SWIFT.binary_op_type_checking_impl, lhs, rhs, *flags)
        assert list(map(described, given)) == list(map(described, wanted)), (lhs, rhs, flags)


@pytest.mark.parametrize(
    ("shape", "error"),
    [
        ([], TypeError),
        ([3], ValueError),
        ([0], ValueError),
        ([2.0], TypeError),
        ([np.int64(2)], AttributeError),
        ([2**11, 2**11], ValueError),
        ((2,), AssertionError),  # of Python, not of the language
    ],
)
def test_shapes_that_are_refused(shape: Any, error: type[Exception]) -> None:
    assert tl.block_type(tl.int32, [2]).numel == 2  # which is remembered, and equals some of these
    for _ in range(2):
        with pytest.raises(error):
            tl.block_type(tl.int32, shape)


def test_types_are_equal_by_element_and_shape() -> None:
    of_constants = tl.block_type(tl.int32, [tl.constexpr(2), tl.constexpr(4)])
    same = tl.block_type(tl.int32, [2, 4])
    assert of_constants == same
    assert (same.name, same.numel, same.mangle()) == ("<['2', '4'], int32>", 8, "i32S2_4S")
    for other in (tl.block_type(tl.int32, [4, 2]), tl.block_type(tl.int64, [2, 4]), tl.int32):
        assert same != other
    assert tl.int32 == tl.constexpr(tl.int32)
    assert tl.int32 == tl.dtype("int32")
    assert tl.int32 != tl.uint32
    pointer = tl.pointer_type(tl.int32)
    assert pointer not in (
        tl.int32,
        tl.pointer_type(tl.int64),
        tl.pointer_type(tl.int32, const=True),
    )
    assert tl.block_type(pointer, [2]) == tl.block_type(tl.pointer_type(tl.int32), [2])
