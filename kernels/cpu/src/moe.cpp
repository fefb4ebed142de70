// Mixture of experts (MoE): tokens are grouped by expert, and each expert's layers run once over
// its tokens.

#include <cstring>
#include <vector>

#include "api.h"
#include "elementwise_kernel.h"
#include "linear.h"
#include "scratch.h"

namespace legato {

// Field by field in kernels/cpu/moe.py.
struct Experts {
  const PackedLinear* const* gate_ups;
  const PackedLinear* const* downs;
  int32_t num_experts;
  int32_t experts_per_token;
  Dtype dtype;
  Activation activation;
  bool gated;
};

namespace {

// The assignments (flattened (token, k) pairs) of each expert, in token order.
struct Groups {
  std::vector<int64_t> starts, assignments;

  Groups(const Experts& experts, const int64_t* topk_ids, int64_t num_assignments)
      : starts(experts.num_experts + 1), assignments(num_assignments) {
    for (int64_t i = 0; i < num_assignments; ++i) ++starts[topk_ids[i] + 1];
    for (int32_t e = 0; e < experts.num_experts; ++e) starts[e + 1] += starts[e];
    std::vector<int64_t> next = starts;
    for (int64_t i = 0; i < num_assignments; ++i) assignments[next[topk_ids[i]]++] = i;
  }
};

// y must be zero; each token's expert outputs are added in expert order.
void run(const Experts& experts, const char* x, const float* topk_weights, const int64_t* topk_ids,
         int64_t num_tokens, char* y) {
  const int64_t H = in_features(*experts.gate_ups[0]), I = in_features(*experts.downs[0]);
  const int64_t inner = out_features(*experts.gate_ups[0]), bytes = bytes_of(experts.dtype);
  const Groups groups(experts, topk_ids, num_tokens * experts.experts_per_token);
  char* const rows = thread_scratch<Experts>(2 * round_to_lines(num_tokens * H * bytes) +
                                             round_to_lines(num_tokens * I * bytes) +
                                             round_to_lines(num_tokens * inner * bytes));
  char* const expert_out = rows + round_to_lines(num_tokens * H * bytes);
  char* const activated = expert_out + round_to_lines(num_tokens * H * bytes);
  char* const gate_up = activated + round_to_lines(num_tokens * I * bytes);
  for (int32_t e = 0; e < experts.num_experts; ++e) {
    const int64_t* assignments = groups.assignments.data() + groups.starts[e];
    const int64_t n = groups.starts[e + 1] - groups.starts[e];
    if (n == 0) continue;
    for (int64_t i = 0; i < n; ++i) {
      std::memcpy(rows + i * H * bytes, x + assignments[i] / experts.experts_per_token * H * bytes,
                  H * bytes);
    }
    const PackedLinear& first = *experts.gate_ups[e];
    if (experts.gated && experts.activation == Activation::silu && linear_can_gate(first)) {
      linear_silu_mul(first, rows, H, n, activated, I);
    } else {
      linear_forward(first, rows, H, n, gate_up, inner);
      activate({gate_up, activated, I, experts.dtype, experts.activation, experts.gated}, n);
    }
    linear_forward(*experts.downs[e], activated, I, n, expert_out, H);
    moe_combine(
        {expert_out, topk_weights, assignments, y, experts.experts_per_token, H, experts.dtype}, n);
  }
}

}  // namespace
}  // namespace legato

// x and y: (T, H), y zeroed. topk_weights and topk_ids: (T, K), each token's experts all different.
LEGATO_API void legato_moe(const legato::Experts* experts, const void* x,
                           const float* topk_weights, const int64_t* topk_ids,
                           int64_t num_tokens, void* y) {
  legato::run(*experts, static_cast<const char*>(x), topk_weights, topk_ids, num_tokens,
              static_cast<char*>(y));
}
