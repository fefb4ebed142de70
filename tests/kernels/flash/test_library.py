"""Which library backend "flash_attn" takes: by what is installed and by the GPU."""

from __future__ import annotations

import importlib.machinery
import sys
from types import ModuleType

import pytest
import torch

from kernels.flash import library
from kernels.flash.library import Flash3Library, FlashLibrary

FLASH = ("flash_attn_varlen_func", "flash_attn_with_kvcache")
FLASH_3 = ("flash_attn_with_kvcache", "get_scheduler_metadata")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A Hopper with neither library."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(library, "find_spec", lambda name: sys.modules.get(name))
    for name in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, None)
    return monkeypatch


def install(machine: pytest.MonkeyPatch, name: str, *functions: str) -> None:
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    for function in functions:
        setattr(module, function, f"{name}.{function}")
    machine.setitem(sys.modules, name, module)


def test_a_hopper_takes_flash_attention_3(machine: pytest.MonkeyPatch) -> None:
    install(machine, "flash_attn", *FLASH)
    install(machine, "flash_attn_interface", *FLASH_3)
    assert library.load() == Flash3Library(*(f"flash_attn_interface.{f}" for f in FLASH_3))  # type: ignore[arg-type]


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_other_gpus_take_flash_attn(
    machine: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    install(machine, "flash_attn", *FLASH)
    install(machine, "flash_attn_interface", *FLASH_3)
    machine.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert library.load() == FlashLibrary(*(f"flash_attn.{f}" for f in FLASH))  # type: ignore[arg-type]


@pytest.mark.parametrize("functions", [None, FLASH_3[:1]], ids=["absent", "too old"])
def test_a_hopper_without_a_usable_one_takes_flash_attn(
    machine: pytest.MonkeyPatch, functions: tuple[str, ...] | None
) -> None:
    install(machine, "flash_attn", *FLASH)
    if functions is not None:
        install(machine, "flash_attn_interface", *functions)
    assert isinstance(library.load(), FlashLibrary)


def test_what_is_missing_is_named(machine: pytest.MonkeyPatch) -> None:
    message = "the flash_attn package is not installed, and flash_attn_interface .* is not usable"
    with pytest.raises(ImportError, match=message):
        library.load()
    install(machine, "flash_attn_interface", *FLASH_3)
    machine.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ImportError, match=message):
        library.load()


def test_a_package_of_this_name_with_other_functions_is_not_taken(
    machine: pytest.MonkeyPatch,
) -> None:
    """FlashAttention-4 is one."""
    install(machine, "flash_attn", "cute")
    with pytest.raises(ImportError, match="flash_attn_varlen_func"):
        library.load()
