"""Ahead-of-time compilation of kernels for a GPU that this machine lacks.

`compiling_for(90)` replaces every Triton launch by a compilation of exactly the variant
that would have been launched: argument types, divisibility, constants, warps and stages. Driving
the ordinary launchers with CPU tensors inside it shows that their kernels build for that GPU.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

_POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}
_OPTIONS = {"num_warps", "num_stages", "enable_fp_fusion"}
_BY_ARCH = ("decode", "dense", "kv_tiles", "prefill", "work_list")  # choose tiles by it
_DIVISIBLE_BY_16 = [["tt.divisibility", 16]]


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """One variant. shared_bytes: static shared memory; cubin: machine code; ptx: its text."""

    name: str
    constants: tuple[tuple[str, object], ...]
    shared_bytes: int
    cubin: bytes = field(repr=False)
    ptx: str = field(repr=False)

    @property
    def stack_bytes(self) -> int:
        """Of a thread: what it keeps in memory for want of registers."""
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
            told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", told)))

    @property
    def tensor_cores(self) -> str | None:
        """The matrix instruction used: tcgen05 (Blackwell), wgmma (Hopper), mma.sync, or none."""
        known = ("tcgen05.mma", "wgmma.mma_async", "mma.sync")
        return next((name for name in known if name in self.ptx), None)

    @property
    def operands(self) -> list[str]:
        """Types that `wgmma` or `mma.sync` multiply, as PTX names them: s8, e4m3, bf16, ..."""
        pattern = r"(?:wgmma\.mma_async|mma\.sync)\S*\.(?:f32|f16|s32)\.(\w+)\.\1"
        return sorted(set(re.findall(pattern, self.ptx)))


@contextlib.contextmanager
def compiling_for(arch: int, once: bool = False) -> Iterator[list[CompiledKernel]]:
    """Collect the kernels compiled for compute capability `arch` (80, 90, 100, ...).

    once: the first variant of each kernel alone, for each combination of its arguments' types.

    Errors of Triton's compiler propagate. Needs kernels that are not interpreted
    (TRITON_INTERPRET unset when they were imported).
    """
    compiled: list[CompiledKernel] = []
    seen: set[tuple[object, ...]] = set()
    target = GPUTarget("cuda", arch, 32)

    def compile_launch(
        kernel: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any
    ) -> None:
        source, rest = _source(kernel, args, options)
        key = (kernel.fn.__name__, repr(source.signature), repr(source.constants), repr(rest))
        if once:
            key = (kernel.fn.__name__, *sorted({*source.signature.values()} - {"constexpr", "i32"}))
        if key in seen:
            return
        seen.add(key)
        result = triton.compile(source, target=target, options=rest)
        constants = tuple((kernel.arg_names[k[0]], v) for k, v in source.constants.items())
        compiled.append(
            CompiledKernel(
                kernel.fn.__name__,
                constants,
                result.metadata.shared,
                result.asm["cubin"],
                result.asm["ptx"],
            )
        )

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(triton.JITFunction, "run", compile_launch))
        for module in _BY_ARCH:
            name = f"kernels.triton.{module}.target_arch"
            patches.enter_context(mock.patch(name, return_value=arch))
        yield compiled


@contextlib.contextmanager
def noting_variants(arch: int) -> Iterator[dict[str, set[str]]]:
    """Collect, by kernel, the specializations that launches would compile, by Triton's own rule;
    nothing is run or compiled."""
    variants: dict[str, set[str]] = {}
    backend = make_backend(GPUTarget("cuda", arch, 32))

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        _, specialization, rest = bind(*args, **options)
        key = str((specialization, sorted(rest.items())))
        variants.setdefault(kernel.fn.__name__, set()).add(key)

    with mock.patch.object(triton.JITFunction, "run", note):
        yield variants


def _source(kernel: Any, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    names = set(kernel.arg_names)
    given = {name: options.pop(name) for name in [*options] if name in names}
    if unknown := options.keys() - _OPTIONS:
        raise TypeError(f"{kernel.fn.__name__} has no parameter {', '.join(sorted(unknown))}")
    bound = inspect.signature(kernel.fn).bind(*args, **given).arguments
    signature: dict[str, str] = {}
    constants: dict[str, object] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    for index, parameter in enumerate(kernel.params):
        value = bound[parameter.name]
        special = not parameter.do_not_specialize
        if parameter.is_constexpr or (isinstance(value, int) and value == 1 and special):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = _POINTERS[value.dtype]
            attributes[(index,)] = _DIVISIBLE_BY_16
        elif isinstance(value, int):
            signature[parameter.name] = "i32"
            if value % 16 == 0 and special:
                attributes[(index,)] = _DIVISIBLE_BY_16
        else:
            signature[parameter.name] = "fp32"
    return ASTSource(kernel, signature, constants, attributes), options
