// All decoder layers of a stage in one call: the same operations in the same order as one by one,
// on memory that is kept from call to call.

#include <map>

#include "api.h"
#include "attention_plan.h"
#include "elementwise_kernel.h"
#include "linear.h"
#include "pool.h"
#include "stack_memory.h"

namespace legato {

// Field by field in kernels/cpu/stack.py.
struct StackLayer {
  const void* input_norm;
  const PackedLinear* qkv;
  const PackedLinear* out;
  const void* post_norm;
  const PackedLinear* gate_up;
  const PackedLinear* down;
  const void* q_norm;  // or null
  const void* k_norm;
  void* cache;
  const float* cos_sin;
  int32_t sliding_window;  // 0: none
};

struct Stack {
  const StackLayer* layers;
  ShapeView shape;
  int32_t num_layers;
  float eps;
};

namespace {

// Activations of one step, carved out of one memory.
class Activations {
 public:
  explicit Activations(int64_t num_bytes) : next_(thread_memory<Stack>(num_bytes)) {}

  void* take(int64_t num_bytes) {
    char* taken = next_;
    next_ += round_to_lines(num_bytes);
    return taken;
  }

 private:
  char* next_;
};

struct Sizes {
  int64_t tokens, hidden, qkv, attended, inner, bytes;

  Sizes(const Stack& stack, const BatchView& batch) {
    const StackLayer& layer = stack.layers[0];
    tokens = batch.num_tokens;
    hidden = in_features(*layer.qkv);
    qkv = out_features(*layer.qkv);
    attended = in_features(*layer.out);
    inner = in_features(*layer.down);
    bytes = bytes_of(stack.shape.dtype);
  }
  int64_t total() const {
    int64_t sum = 0;
    for (int64_t width : {hidden, qkv, attended, attended, inner, 2 * inner}) {
      sum += round_to_lines(tokens * width * bytes);
    }
    return sum;
  }
};

void run_stack(const Stack& stack, const BatchView& batch, const void* x, void* residual,
               void* out) {
  const Sizes size(stack, batch);
  const int64_t T = size.tokens, H = size.hidden, I = size.inner;
  Activations activations(size.total());
  void* normed = activations.take(T * H * size.bytes);
  void* qkv = activations.take(T * size.qkv * size.bytes);
  void* query = activations.take(T * size.attended * size.bytes);
  void* attended = activations.take(T * size.attended * size.bytes);
  void* inner = activations.take(T * I * size.bytes);
  void* gate_up = activations.take(T * 2 * I * size.bytes);

  std::map<int32_t, AttentionPlan> plans;  // by window; most models have one
  const Dtype dtype = stack.shape.dtype;
  for (int32_t i = 0; i < stack.num_layers; ++i) {
    const StackLayer& layer = stack.layers[i];
    ShapeView shape = stack.shape;
    shape.sliding_window = layer.sliding_window;

    if (i == 0 && x != nullptr) {
      norm({x, residual, layer.input_norm, normed, H, stack.eps, dtype}, T);
    } else {
      norm({residual, nullptr, layer.input_norm, normed, H, stack.eps, dtype}, T);
    }
    linear_forward(*layer.qkv, normed, H, T, qkv, size.qkv);
    rope_and_cache({qkv, layer.cos_sin, query, layer.cache, layer.q_norm, layer.k_norm, stack.eps,
                    &batch, shape});
    const auto plan =
        plans.try_emplace(layer.sliding_window, batch, shape, Pool::get().size()).first;
    plan->second.run({query, layer.cache, attended, &batch, shape});
    linear_add(*layer.out, attended, size.attended, T, residual, H);

    norm({residual, nullptr, layer.post_norm, normed, H, stack.eps, dtype}, T);
    if (linear_can_gate(*layer.gate_up)) {
      linear_silu_mul(*layer.gate_up, normed, H, T, inner, I);
    } else {
      linear_forward(*layer.gate_up, normed, H, T, gate_up, 2 * I);
      silu_mul({gate_up, inner, I, dtype}, T);
    }
    if (i + 1 < stack.num_layers) {
      linear_add(*layer.down, inner, I, T, residual, H);
    } else {
      linear_forward(*layer.down, inner, I, T, out, H);  // the caller adds it
    }
  }
}

}  // namespace
}  // namespace legato

// x: what the residual still lacks, or null. The last layer's output goes to `out`, not yet added.
LEGATO_API void legato_stack_run(const legato::Stack* stack, const legato::BatchView* batch,
                                 const void* x, void* residual, void* out) {
  if (batch->num_tokens > 0) legato::run_stack(*stack, *batch, x, residual, out);
}
