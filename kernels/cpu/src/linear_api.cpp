// The C functions behind kernels/cpu/linear.py.
#include "api.h"
#include "linear.h"

using legato::PackedLinear;

LEGATO_API void legato_linear_forward(const PackedLinear* linear, const void* x, int64_t ldx,
                                      int64_t M, void* out, int64_t ldo) {
  legato::linear_forward(*linear, x, ldx, M, out, ldo);
}

LEGATO_API void legato_linear_forward_f32(const PackedLinear* linear, const void* x, int64_t ldx,
                                          int64_t M, float* out, int64_t ldo) {
  legato::linear_forward_f32(*linear, x, ldx, M, out, ldo);
}
