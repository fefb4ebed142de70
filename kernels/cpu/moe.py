"""Mixture of experts in one C++ call (src/moe.cpp); routing is done in torch."""

from __future__ import annotations

import ctypes
import functools
import weakref
from typing import Any

import torch

from kernels.cpu import library
from kernels.cpu.library import FLOAT_CODES, Pointer
from kernels.cpu.linear import CpuLinear
from kernels.interface import Backend
from kernels.layer_form import ACTIVATIONS, LayerForm
from kernels.layer_weights import Experts, Linear
from kernels.torch.moe import mixed


class _View(ctypes.Structure):
    _fields_ = (
        ("gate_ups", ctypes.c_void_p),
        ("downs", ctypes.c_void_p),
        ("num_experts", ctypes.c_int32),
        ("experts_per_token", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("gated", ctypes.c_bool),
    )


# Per layer: a view of its experts, and the objects that it points into.
_views: weakref.WeakKeyDictionary[Experts, tuple[_View, Any]] = weakref.WeakKeyDictionary()


def moe(backend: Backend, x_TH: torch.Tensor, experts: Experts, form: LayerForm) -> torch.Tensor:
    """`Backend.moe`, bit-identical to the separate operations. Raises ValueError for an x that does
    not match the experts."""
    if experts not in _views:
        _views[experts] = _view(experts, form)
    view, _ = _views[experts]
    hidden, dtype = experts.downs[0].out_features, x_TH.dtype
    if x_TH.dim() != 2 or x_TH.shape[1] != hidden or FLOAT_CODES.get(dtype) != view.dtype:
        raise ValueError(
            f"x is {tuple(x_TH.shape)} {dtype}, not (T, {hidden}) of the experts' type"
        )

    def weighted(
        x_XH: torch.Tensor, weights_XK: torch.Tensor, ids_XK: torch.Tensor
    ) -> torch.Tensor:
        x_XH, weights_XK, ids_XK = x_XH.contiguous(), weights_XK.contiguous(), ids_XK.contiguous()
        y_XH = torch.zeros_like(x_XH)
        _run()(
            view, x_XH.data_ptr(), weights_XK.data_ptr(), ids_XK.data_ptr(), len(x_XH),
            y_XH.data_ptr(),
        )  # fmt: skip
        return y_XH

    return mixed(backend, x_TH, experts, form, weighted)


@functools.cache
def _run() -> Any:
    return library.function(
        "legato_moe", None, ctypes.POINTER(_View), *[Pointer] * 3, ctypes.c_int64, Pointer
    )


def _view(experts: Experts, form: LayerForm) -> tuple[_View, Any]:
    gate_ups, downs = (list(map(_packed, part)) for part in (experts.gate_ups, experts.downs))
    hidden, inner, dtype = downs[0].out_features, downs[0].in_features, downs[0].dtype
    wanted = ((hidden, inner * (2 if form.gated else 1)), (inner, hidden))
    for linears, features in zip((gate_ups, downs), wanted, strict=True):
        for linear in linears:
            found = (linear.in_features, linear.out_features)
            if found != features or linear.dtype != dtype:
                raise ValueError(f"an expert's layer is {found} {linear.dtype}, not {features}")
    tables = [
        (ctypes.c_void_p * len(linears))(*[linear.handle for linear in linears])
        for linears in (gate_ups, downs)
    ]
    view = _View(
        *map(ctypes.addressof, tables), len(downs), experts.weighted_per_token, FLOAT_CODES[dtype],
        ACTIVATIONS.index(form.activation), form.gated,
    )  # fmt: skip
    return view, (tables, gate_ups, downs)


def _packed(linear: Linear) -> CpuLinear:
    if not isinstance(linear, CpuLinear):
        raise TypeError(f"the cpu backend was given a layer of {type(linear).__name__}")
    return linear
