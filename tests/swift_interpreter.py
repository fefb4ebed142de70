"""Triton's interpreter without work that it repeats or throws away; it computes the same.

In each call of a function from a kernel it looks through the whole language for what to replace,
for each array it builds a table of numpy's types, for each sum of integers it works out an
assertion that it never makes, and for each value it takes its shape apart, checks it and writes
its type's name. A small test spends most of its time on these. What Triton refuses still is: only
what its own functions let pass is remembered (tests/kernels/triton/test_swift_interpreter.py).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import os
from collections.abc import Callable
from importlib import metadata
from types import ModuleType
from typing import Any

_RELEASES = "3.9."  # of Triton, whose inner functions these replace


def fits() -> bool:
    """Not without Triton, with another release of it, or with a GPU: then tests take longer."""
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        return False
    return metadata.version("triton").startswith(_RELEASES)


def install() -> None:
    """For the rest of this process, where it fits."""
    if not fits():
        return
    from triton.runtime import interpreter

    if not hasattr(interpreter._patch_lang, "original"):
        _replace_once_a_launch(interpreter)
        _keep_names(interpreter)
        _keep_types(interpreter)
        _assert_no_more(interpreter)
        _call_directly(interpreter)
        _keep_shapes(interpreter.tl.core, interpreter.interpreter_builder)
        _keep_promotions(interpreter.tl.core, interpreter.interpreter_semantic)


def _replace_once_a_launch(interpreter: Any) -> None:
    """What a launch has replaced in the language holds until its end, in all it calls."""
    tl, original = interpreter.tl, interpreter._patch_lang
    replaced: set[ModuleType] = set()

    @functools.cache
    def languages(function: Any) -> set[ModuleType]:
        seen = list(function.__globals__.values())
        return {language for language in (tl, tl.core) if any(language is s for s in seen)}

    def patch_lang(function: Any) -> Any:
        needed = languages(function)
        if needed and needed <= replaced:
            return interpreter._LangPatchScope()
        scope = original(function)
        if not replaced:  # the launch itself: only its scope is restored
            restore = scope.restore

            def end() -> None:
                replaced.clear()
                restore()

            scope.restore = end
        replaced.update(needed)
        return scope

    patch_lang.original = original  # type: ignore[attr-defined]
    interpreter._patch_lang = patch_lang


def _keep_names(interpreter: Any) -> None:
    """Which members of the language are built in, found out once."""
    is_builtin = interpreter.tl.core.is_builtin
    names: dict[Any, list[str]] = {}

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if package not in names:
            members = inspect.getmembers(package)
            names[package] = [name for name, member in members if is_builtin(member)]
        for name in names[package]:
            member = getattr(package, name)
            if is_builtin(member):  # else replaced already
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin


def _keep_types(interpreter: Any) -> None:
    tl, of_any = interpreter.tl, interpreter._get_np_dtype
    of_scalar = functools.cache(of_any)

    def get_np_dtype(dtype: Any) -> Any:
        scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        # Pointers' types have no hash.
        return (of_any if isinstance(scalar, tl.pointer_type) else of_scalar)(scalar)

    interpreter._get_np_dtype = get_np_dtype


def _assert_no_more(interpreter: Any) -> None:
    builder = interpreter.interpreter_builder
    if not builder.options.debug:  # with it alone are overflows asserted
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _call_directly(interpreter: Any) -> None:
    """A builtin's replacement is made once, and asks for no semantic that it is given itself."""
    builtin = interpreter.tl.core.builtin(_call_directly).__code__  # of all that it wraps

    @functools.cache
    def replacement(member: Any) -> Callable[..., Any]:
        function = member.__wrapped__ if member.__code__ is builtin else member

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **kwargs)

        return call

    def patch_attr(package: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        scope.set_attr(package, name, replacement(member))

    interpreter._patch_attr = patch_attr


def _keep_shapes(core: Any, builder: Any) -> None:
    """Shapes are checked once, and types have their names when asked for them."""
    block_type, constexpr = core.block_type, core.constexpr
    init_checked, to_any_ir = block_type.__init__, block_type.to_ir
    unwrap_any, whole = core._unwrap_if_constexpr, {int, float, bool, str, core.tensor, core.dtype}

    @functools.cache
    def of_block(sizes: tuple[int, ...]) -> tuple[Any, int]:
        return core.tuple(sizes), core.validate_block_shape(sizes)

    @functools.cache
    def of_tensor(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        numel = functools.reduce(lambda product, size: product * size, sizes, 1)
        return constexpr(numel), core.tuple([constexpr(size) for size in sizes])

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes: tuple[Any, ...] = ()
        if isinstance(shape, list | core.tuple):
            sizes = tuple([s.value if isinstance(s, constexpr) else s for s in shape])
        if not sizes or any(type(size) is not int for size in sizes):
            init_checked(self, element_ty, shape)  # which says what is wrong
            return
        self.element_ty = element_ty
        self.shape, self.numel = of_block(sizes)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = of_tensor(tuple(type.shape.values) if type.is_block() else ())

    def equal_blocks(self: Any, other: Any) -> bool:
        return (
            isinstance(other, block_type)
            and self.element_ty == other.element_ty
            and self.shape.values == other.shape.values
        )

    def equal_types(self: Any, other: Any) -> bool:
        other = other.value if isinstance(other, constexpr) else other
        return self is other or (isinstance(other, core.dtype) and self.name == other.name)

    def to_ir(self: Any, to: Any) -> Any:
        element = self.element_ty
        same = to is builder and type(element) is core.dtype and element.name != "void"
        return self if same else to_any_ir(self, to)

    def unwrap(value: Any) -> Any:
        if type(value) is constexpr:
            return value.value
        return value if type(value) in whole else unwrap_any(value)

    core._unwrap_if_constexpr = unwrap
    name = functools.cached_property(lambda self: f"<{self.shape}, {self.element_ty}>")
    name.__set_name__(block_type, "name")
    block_type.name, block_type.__init__, block_type.__eq__ = name, init_block, equal_blocks
    block_type.to_ir, core.dtype.__eq__, core.tensor.__init__ = to_ir, equal_types, init_tensor


def _keep_promotions(core: Any, semantic: Any) -> None:
    """The type that two have in common is found out once; what has it already is left alone."""
    of_any, cast = semantic.computation_type_impl, semantic._cast_to_computation_type
    broadcast, check = semantic.broadcast_impl_value, semantic.binary_op_type_checking_impl
    found: dict[tuple[str, bool, str, bool, bool], Any] = {}

    def common(a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, divides: bool) -> Any:
        key = a.name, a_is_scalar, b.name, b_is_scalar, divides
        if key not in found:
            found[key] = of_any(a, a_is_scalar, b, b_is_scalar, divides)
        return found[key]

    def cast_to_common(value: Any, dtype: Any) -> Any:
        if isinstance(value, core.tensor) and value.dtype.name == dtype.name:
            return value
        return cast(value, dtype)

    def broadcast_values(lhs: Any, rhs: Any) -> tuple[Any, Any]:
        blocks = lhs.type.is_block(), rhs.type.is_block()
        if not any(blocks):
            return lhs, rhs
        if not all(blocks):
            return broadcast(lhs, rhs)
        ours, theirs = lhs.type.shape.values, rhs.type.shape.values
        if ours == theirs:
            return lhs, rhs
        pairs = list(zip(ours, theirs, strict=False))
        if len(ours) != len(theirs) or any(a != b and 1 not in (a, b) for a, b in pairs):
            return broadcast(lhs, rhs)
        shape = [max(pair) for pair in pairs]
        if ours != shape:
            lhs = semantic.broadcast_impl_shape(lhs, shape)
        return lhs, rhs if theirs == shape else semantic.broadcast_impl_shape(rhs, shape)

    def check_operands(
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> tuple[Any, Any]:
        if isinstance(lhs, core.tensor) and isinstance(rhs, core.tensor):
            ours, theirs = lhs.dtype, rhs.dtype
            points = ours.is_ptr()
            alike = ours is theirs and not points and not div_or_mod
            if alike or (points and allow_lhs_ptr and theirs.is_int()):
                return broadcast_values(lhs, rhs)
        return check(lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    semantic.computation_type_impl = common
    semantic.binary_op_type_checking_impl = check_operands
    semantic._cast_to_computation_type = cast_to_common
    semantic.broadcast_impl_value = broadcast_values
