"""Triton's interpreter without work that it repeats or throws away; it computes the same.

In each call of a function from a kernel it looks through the whole language for what to replace,
for each array it builds a table of numpy's types, and for each sum of integers it works out an
assertion that it never makes. A small test spends most of its time on these.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import os
from types import ModuleType
from typing import Any


def install() -> None:
    """For the rest of this process; without Triton or with a GPU, nothing."""
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    if not hasattr(interpreter._patch_lang, "original"):
        _replace_once_a_launch(interpreter)
        _keep_names(interpreter)
        _keep_types(interpreter)
        _assert_no_more(interpreter)


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
