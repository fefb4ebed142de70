"""Mixture of experts in five launches, whatever the routing: sort, gate and up with the activation,
down with the routing weights, sum.

The experts' weights stay where they are: kernels read their addresses from a table. All sizes of
batch take one tile, and a row of a product does not depend on the rows beside it, so a token has
the same result alone and in any batch. Experts whose inputs are in act order are torch's generic
path.

Suffixes beside those of `kernels.interface`: A assignments (T * K), E experts, B and R as in
`routing`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.interface import Backend
from kernels.layer_form import LayerForm
from kernels.layer_weights import Experts
from kernels.packing import PackedWeight
from kernels.torch import moe as generic
from kernels.triton.grouped import GroupedLayers, GroupedLinear, grouped
from kernels.triton.linear import group_product
from kernels.triton.routing import ExpertBlocks, sort_by_expert
from kernels.triton.tiles import expert_tile

_BLOCK_H = 1024


@triton.jit
def _activate(x: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """As `TorchBackend.activate`; NaN stays NaN, which makes the step fail."""
    if ACTIVATION == "silu":
        x = x * tl.sigmoid(x)
    elif ACTIVATION == "clamped_swiglu":
        x = tl.where(x > 7.0, 7.0, x)
        x = x * tl.sigmoid(1.702 * x)
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(0.7071067811865476 * x))
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh(y)) / 2 is sigmoid(2 y)
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "relu":
        x = tl.where(x < 0.0, 0.0, x)
    elif ACTIVATION == "relu2":
        x = tl.where(x < 0.0, 0.0, x * x)
    return x


@triton.jit
def _expert_linear_kernel(
    x_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    out_ptr: tl.tensor,
    K: tl.constexpr,
    OUT: tl.constexpr,
    ROWS_PER_X: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    KIND: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HALF_SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One block of assignments through its expert. GATED: `OUT` rows of up follow those of gate."""
    block = tl.program_id(0)
    expert = tl.load(experts_ptr + block)
    if expert < 0:
        return
    row_R = tl.load(rows_ptr + block * ROWS + tl.arange(0, ROWS))
    is_row_R = row_R >= 0
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    inside_O = o < OUT
    x_row_R1 = x_ptr + (row_R // ROWS_PER_X)[:, None].to(tl.int64) * K
    acc_RO = tl.zeros((ROWS, BLOCK_O), tl.float32)
    up_RO = tl.zeros((ROWS, BLOCK_O), tl.float32)
    address_ptr = weights_ptr + expert
    if KIND == "dense":
        weight_ptr = tl.load(address_ptr).to(tl.pointer_type(x_ptr.dtype.element_ty))
        weight_ptr = tl.multiple_of(weight_ptr, 16)  # see `grouped`
        weight_row_O1 = weight_ptr + o[:, None].to(tl.int64) * K
        column = tl.arange(0, BLOCK_K)
        for base in range(0, K, BLOCK_K):
            k = base + column
            inside_K = k < K
            mask_RK = is_row_R[:, None] & inside_K[None, :]
            x_RK = tl.load(x_row_R1 + k[None, :], mask=mask_RK, other=0.0)
            mask_OK = inside_O[:, None] & inside_K[None, :]
            weight_OK = tl.load(weight_row_O1 + k[None, :], mask=mask_OK, other=0.0)
            acc_RO = tl.dot(x_RK, tl.trans(weight_OK), acc_RO, input_precision=PRECISION)
            if GATED:
                weight_OK = tl.load(weight_row_O1 + OUT * K + k[None, :], mask=mask_OK, other=0.0)
                up_RO = tl.dot(x_RK, tl.trans(weight_OK), up_RO, input_precision=PRECISION)
    else:
        code_type: tl.constexpr = tl.int8 if KIND == "int8" else tl.uint8
        scale_type: tl.constexpr = tl.float16 if HALF_SCALES else tl.float32
        codes_ptr = tl.load(address_ptr).to(tl.pointer_type(code_type))
        codes_ptr = tl.multiple_of(codes_ptr, 16)
        scales_ptr = tl.load(address_ptr + NUM_EXPERTS).to(tl.pointer_type(scale_type))
        zero_ptr = tl.load(address_ptr + 2 * NUM_EXPERTS).to(tl.pointer_type(tl.int8))
        for group in range(NUM_GROUPS):
            acc_RO += group_product(
                x_row_R1, is_row_R, codes_ptr, scales_ptr, zero_ptr, o, inside_O, group,
                K, NUM_GROUPS, KIND, GROUP, WIDTH, HAS_ZEROS, PRECISION,
            )  # fmt: skip
            if GATED:
                up_RO += group_product(
                    x_row_R1, is_row_R, codes_ptr, scales_ptr, zero_ptr, o + OUT, inside_O, group,
                    K, NUM_GROUPS, KIND, GROUP, WIDTH, HAS_ZEROS, PRECISION,
                )  # fmt: skip
    if HAS_BIAS:
        bias_row_ptr = bias_ptr + expert * OUT * (2 if GATED else 1) + o
        acc_RO += tl.load(bias_row_ptr, mask=inside_O, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up_O = tl.load(bias_row_ptr + OUT, mask=inside_O, other=0.0)
            up_RO += up_O.to(tl.float32)[None, :]
    acc_RO = _activate(acc_RO, ACTIVATION)
    if GATED:
        if ACTIVATION == "clamped_swiglu":
            up_RO = tl.where(up_RO > 7.0, 7.0, tl.where(up_RO < -7.0, -7.0, up_RO)) + 1.0
        acc_RO *= up_RO
    if SCALED:
        acc_RO *= tl.load(scale_ptr + row_R, mask=is_row_R, other=0.0)[:, None]
    out_RO = out_ptr + row_R[:, None].to(tl.int64) * OUT + o[None, :]
    mask_RO = is_row_R[:, None] & inside_O[None, :]
    tl.store(out_RO, acc_RO.to(out_ptr.dtype.element_ty), mask=mask_RO)


@triton.jit
def _sum_experts_kernel(
    parts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = h < H
    total_H = tl.zeros((BLOCK_H,), tl.float32)
    for k in tl.static_range(TOP_K):
        part_ptr = parts_ptr + (token * TOP_K + k) * H + h
        total_H += tl.load(part_ptr, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * H + h, total_H.to(out_ptr.dtype.element_ty), mask=inside)


def moe(backend: Backend, x_TH: torch.Tensor, experts: Experts, form: LayerForm) -> torch.Tensor:
    """`Backend.moe`. Raises ValueError for an x that does not match the experts."""
    layers = grouped(experts)
    if layers is None:
        return generic.moe(backend, x_TH, experts, form)
    hidden, inner = layers[1].size
    wide = (inner * (2 if form.gated else 1), hidden)
    dtypes = {layer.dtype for layer in layers} - {None}
    if layers[0].size != wide or len(dtypes) > 1:
        raise ValueError(f"gate and up are {layers[0].size} {layers[0].dtype}, not {wide}")
    if x_TH.dim() != 2 or x_TH.shape[1] != hidden or dtypes - {x_TH.dtype}:
        raise ValueError(
            f"x is {tuple(x_TH.shape)} {x_TH.dtype}, not (T, {hidden}) of the experts' type"
        )

    def weighted(
        x_XH: torch.Tensor, weights_XK: torch.Tensor, ids_XK: torch.Tensor
    ) -> torch.Tensor:
        return routed(x_XH.contiguous(), weights_XK, ids_XK, layers, form)

    return generic.mixed(backend, x_TH, experts, form, weighted)


def routed(
    x_TH: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    layers: GroupedLayers,
    form: LayerForm,
) -> torch.Tensor:
    """(T, H): the sum of each token's experts by their weights, float32, in the order in which it
    names them."""
    T, hidden = x_TH.shape
    top_k = topk_ids_TK.shape[1]
    gate_up, down = layers
    y_TH = torch.empty_like(x_TH)
    if not T:
        return y_TH
    tile = expert_tile(x_TH.dtype)
    num_experts = gate_up.addresses_PE.shape[1]
    blocks = sort_by_expert(topk_ids_TK.contiguous(), num_experts, tile.rows)
    weights_TK = topk_weights_TK.contiguous()
    inner_AI = x_TH.new_empty((T * top_k, down.size[1]))
    activation = form.activation
    _launch(x_TH, gate_up, blocks, None, inner_AI, top_k, activation, form.gated)
    parts_AH = x_TH.new_empty((T * top_k, hidden))
    _launch(inner_AI, down, blocks, weights_TK, parts_AH, 1, "none", False)
    _sum_experts_kernel[(T, triton.cdiv(hidden, _BLOCK_H))](
        parts_AH, y_TH, H=hidden, TOP_K=top_k, BLOCK_H=_BLOCK_H, num_warps=4
    )
    return y_TH


def _launch(
    x_XK: torch.Tensor,
    layer: GroupedLinear,
    blocks: ExpertBlocks,
    scale_A: torch.Tensor | None,
    out_AO: torch.Tensor,
    rows_per_x: int,
    activation: str,
    gated: bool,
) -> None:
    tile = expert_tile(x_XK.dtype)
    num_outputs = out_AO.shape[1]
    first = layer.held[0]
    packed = first if isinstance(first, PackedWeight) else None
    block_o = tile.columns // 2 if gated else tile.columns
    # Blocks of one expert run side by side and share its weights in the cache.
    _expert_linear_kernel[(blocks.num_blocks, triton.cdiv(num_outputs, block_o))](
        x_XK,
        layer.addresses_PE,
        x_XK if layer.bias_EO is None else layer.bias_EO,
        x_XK if scale_A is None else scale_A,
        blocks.experts_B,
        blocks.rows_BR,
        out_AO,
        K=x_XK.shape[1],
        OUT=num_outputs,
        ROWS_PER_X=rows_per_x,
        ACTIVATION=activation,
        GATED=gated,
        HAS_BIAS=layer.bias_EO is not None,
        SCALED=scale_A is not None,
        KIND="dense" if packed is None else packed.kind,
        NUM_EXPERTS=layer.addresses_PE.shape[1],
        NUM_GROUPS=0 if packed is None else packed.scales.shape[1],
        GROUP=0 if packed is None else packed.group,
        WIDTH=0 if packed is None else packed.width,
        HAS_ZEROS=packed is not None and packed.zeros is not None,
        HALF_SCALES=packed is not None and packed.scales.dtype == torch.float16,
        ROWS=tile.rows,
        BLOCK_O=block_o,
        BLOCK_K=tile.block_k,
        PRECISION="ieee" if x_XK.dtype == torch.float32 else "tf32",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
