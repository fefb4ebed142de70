// A mixture of experts: tokens grouped by expert, each expert's layers once over its tokens.

#include <cstring>
#include <vector>

#include "api.h"
#include "elementwise_kernel.h"
#include "linear.h"
#include "stack_memory.h"

namespace legato {

// Field by field in kernels/cpu/experts.py.
struct Experts {
  const PackedLinear* const* gate_ups;
  const PackedLinear* const* downs;
  int32_t num_experts;
  int32_t per_token;
  Dtype dtype;
  Activation activation;
  bool gated;
};

namespace {

// The places (token * per_token + k) of each expert, in the order of the tokens.
struct Groups {
  std::vector<int64_t> starts, places;

  Groups(const Experts& experts, const int64_t* chosen, int64_t num_places)
      : starts(experts.num_experts + 1), places(num_places) {
    for (int64_t i = 0; i < num_places; ++i) ++starts[chosen[i] + 1];
    for (int32_t e = 0; e < experts.num_experts; ++e) starts[e + 1] += starts[e];
    std::vector<int64_t> next = starts;
    for (int64_t i = 0; i < num_places; ++i) places[next[chosen[i]]++] = i;
  }
};

// y, zero at first, gets each token's sum in the order of the experts.
void run(const Experts& experts, const char* x, const float* shares, const int64_t* chosen,
         int64_t num_tokens, char* y) {
  const int64_t H = in_features(*experts.gate_ups[0]), I = in_features(*experts.downs[0]);
  const int64_t inner = out_features(*experts.gate_ups[0]), bytes = bytes_of(experts.dtype);
  const Groups groups(experts, chosen, num_tokens * experts.per_token);
  char* const rows = thread_memory<Experts>(2 * round_to_lines(num_tokens * H * bytes) +
                                            round_to_lines(num_tokens * I * bytes) +
                                            round_to_lines(num_tokens * inner * bytes));
  char* const given = rows + round_to_lines(num_tokens * H * bytes);
  char* const activated = given + round_to_lines(num_tokens * H * bytes);
  char* const gate_up = activated + round_to_lines(num_tokens * I * bytes);
  for (int32_t e = 0; e < experts.num_experts; ++e) {
    const int64_t* places = groups.places.data() + groups.starts[e];
    const int64_t n = groups.starts[e + 1] - groups.starts[e];
    if (n == 0) continue;
    for (int64_t i = 0; i < n; ++i) {
      std::memcpy(rows + i * H * bytes, x + places[i] / experts.per_token * H * bytes, H * bytes);
    }
    const PackedLinear& first = *experts.gate_ups[e];
    if (experts.gated && experts.activation == Activation::silu && linear_can_gate(first)) {
      linear_silu_mul(first, rows, H, n, activated, I);
    } else {
      linear_forward(first, rows, H, n, gate_up, inner);
      activate({gate_up, activated, I, experts.dtype, experts.activation, experts.gated}, n);
    }
    linear_forward(*experts.downs[e], activated, I, n, given, H);
    add_shares({given, shares, places, y, experts.per_token, H, experts.dtype}, n);
  }
}

}  // namespace
}  // namespace legato

// x and y: (T, H), y zero. shares and chosen: (T, K), each token's experts all different.
LEGATO_API void legato_experts_run(const legato::Experts* experts, const void* x,
                                   const float* shares, const int64_t* chosen, int64_t num_tokens,
                                   void* y) {
  legato::run(*experts, static_cast<const char*>(x), shares, chosen, num_tokens,
              static_cast<char*>(y));
}
