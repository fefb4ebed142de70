// Linear layers: out = x W^T + b, with W packed once.
//
// A token's result has the same bits alone and in any batch: every output element is summed in one
// fixed order of k, for every M, in every micro-kernel and on any number of threads. The fused
// forms round where the separate operations would, so fusing changes no bit either.
#pragma once

#include <cstdint>

#include "tiles.h"

namespace legato {

enum class Type : int { f32 = 0, bf16 = 1, f16 = 2 };

inline int64_t size_of(Type type) { return type == Type::f32 ? 4 : 2; }

// A packed weight: made and freed by the C functions in linear_pack.cpp (Python's handle is
// this pointer). Reading it from several threads is safe.
struct PackedLinear;

int64_t in_features(const PackedLinear& linear);   // K
int64_t out_features(const PackedLinear& linear);  // O
Type activation_type(const PackedLinear& linear);  // of x, out and residual

// Whether x may be given as tiles, with kTiled as its row stride: it need not be copied then.
bool linear_takes_tiles(const PackedLinear& linear);

// out[m, o] = sum_k x[m, k] W[o, k] + b[o]. ldx and ldo are row strides in elements; x and out must
// not overlap. Uses Pool::get(), so call it from outside a task.
void linear_forward(const PackedLinear& linear, const void* x, int64_t ldx, int64_t M, void* out,
                    int64_t ldo);

// The same with float output (logits).
void linear_forward_f32(const PackedLinear& linear, const void* x, int64_t ldx, int64_t M,
                        float* out, int64_t ldo);

// residual[m, o] += x W^T + b, in place; the sum before it is rounded to the activation type first.
void linear_add(const PackedLinear& linear, const void* x, int64_t ldx, int64_t M, void* residual,
                int64_t ldr);

// For a gate_up layer (rows: all of gate, then all of up): out[m, i] = silu(gate) * up, O / 2 wide.
// Gate and up are rounded to the activation type first. Only where linear_can_gate() says so (O / 2
// a multiple of 16); elsewhere use linear_forward and a separate silu-multiply. ldo: or kTiled, for
// tiles, where O / 2 is a multiple of 32 and the type is bf16.
bool linear_can_gate(const PackedLinear& linear);
void linear_silu_mul(const PackedLinear& linear, const void* x, int64_t ldx, int64_t M, void* out,
                     int64_t ldo);

}  // namespace legato
