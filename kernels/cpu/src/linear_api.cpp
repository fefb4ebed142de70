// The C functions behind kernels/cpu/linear.py.
#include "api.h"
#include "linear.h"

using legato::PackedLinear;

LEGATO_API void legato_linear_forward(const PackedLinear* linear, const void* x, int64_t ldx,
                                      int64_t M, void* out, int64_t ldo) {
  legato::linear_forward(*linear, x, ldx, M, out, ldo);
}

// One layer per head, all of one shape: x is (M, heads, K), in rows of ldx elements, and out
// (M, heads, O).
LEGATO_API void legato_linear_forward_heads(const PackedLinear* const* heads, int64_t num_heads,
                                            int64_t element_bytes, const void* x, int64_t ldx,
                                            int64_t M, void* out) {
  const int64_t K = legato::in_features(*heads[0]), O = legato::out_features(*heads[0]);
  for (int64_t h = 0; h < num_heads; ++h) {
    legato::linear_forward(*heads[h], static_cast<const char*>(x) + h * K * element_bytes, ldx, M,
                           static_cast<char*>(out) + h * O * element_bytes, num_heads * O);
  }
}

LEGATO_API void legato_linear_forward_f32(const PackedLinear* linear, const void* x, int64_t ldx,
                                          int64_t M, float* out, int64_t ldo) {
  legato::linear_forward_f32(*linear, x, ldx, M, out, ldo);
}
