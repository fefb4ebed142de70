// All decoder layers of a stage in one call: the operations of the unfused path in the same order,
// on memory that is reused between calls.

#include <map>

#include "adapters.h"
#include "all_reduce.h"
#include "api.h"
#include "attention_plan.h"
#include "elementwise_kernel.h"
#include "linear.h"
#include "pool.h"
#include "scratch.h"

namespace legato {

// Field by field in kernels/cpu/stack.py. Norms and biases that a model lacks are null.
struct StackLayer {
  const void* input_norm;
  const void* input_norm_bias;
  const PackedLinear* qkv;
  const PackedLinear* out;
  const void* attention_out_norm;
  const void* post_norm;
  const void* post_norm_bias;
  const PackedLinear* gate_up;
  const PackedLinear* down;
  const void* mlp_out_norm;
  const void* q_norm;
  const void* k_norm;
  void* cache;
  const float* cos_sin;
  const float* query_scales;  // as in RopeArgs
  const float* sinks;  // or null
  int32_t sliding_window;  // as in ShapeView
  const AdapterModule* adapters[4];  // of qkv, out, gate_up, down, or null
};

enum { kQkv, kOut, kGateUp, kDown };

struct Stack {
  const StackLayer* layers;
  ShapeView shape;
  int32_t num_layers;
  float eps;
  Activation activation;
  bool centered;  // layer norms
  bool gated;
  bool parallel;
  bool whole_qk_norm;
  bool wide_norms;  // as in NormArgs
  AllReduce* all_reduce;  // or null: not tensor-parallel
};

namespace {

// Arena of one step's activations.
class Activations {
 public:
  explicit Activations(int64_t num_bytes) : next_(thread_scratch<Stack>(num_bytes)) {}

  void* take(int64_t num_bytes) {
    char* taken = next_;
    next_ += round_to_lines(num_bytes);
    return taken;
  }

 private:
  char* next_;
};

// The input of a linear layer.
struct Input {
  const void* x;
  int64_t stride;  // of its rows, or kTiled
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
    for (int64_t width : {hidden, hidden, qkv, attended, attended, inner, 2 * inner}) {
      sum += round_to_lines(tokens * width * bytes);
    }
    return sum;
  }
};

// One step; mirrors `Decoder.layers` (actors/stage/models/decoder.py).
class Run {
 public:
  // runs: of adapters, or null.
  Run(const Stack& stack, const BatchView& batch, const AdapterRuns* runs, void* residual,
      void* out)
      : stack_(stack), batch_(batch), size_(stack, batch), activations_(size_.total()),
        residual_(residual), out_(out) {
    if (runs != nullptr) tiles_ = tiles_of(*runs);
    normed_ = take(size_.hidden);
    mlp_normed_ = take(size_.hidden);
    qkv_ = take(size_.qkv);
    query_ = take(size_.attended);
    attended_ = take(size_.attended);
    inner_ = take(size_.inner);
    gate_up_ = take(2 * size_.inner);
  }

  // added: still to be added to the residual, or null. After an error the results are undefined.
  RankError layers(const void* added) {
    const int64_t T = size_.tokens, H = size_.hidden;
    for (int32_t i = 0; i < stack_.num_layers && error_ == RankError::none; ++i) {
      const StackLayer& layer = stack_.layers[i];
      const bool shared = stack_.parallel && layer.post_norm == nullptr;
      const bool tiled = takes_tiles(*layer.qkv) && (!shared || takes_tiles(*layer.gate_up));
      Input input = sum_normed(added, layer.input_norm, layer.input_norm_bias, normed_, tiled);
      const Input attended = attend(layer, input);
      if (stack_.parallel) {
        if (!shared) {
          input = sum_normed(nullptr, layer.post_norm, layer.post_norm_bias, mlp_normed_,
                             takes_tiles(*layer.gate_up));
        }
        linear_forward(*layer.out, attended.x, attended.stride, T, out_, H);
        adapt_with(layer.adapters[kOut], attended_, out_);
        const Input inner = mlp(layer, input);
        if (tiles_.empty()) {
          linear_add(*layer.down, inner.x, inner.stride, T, out_, H);
        } else {
          linear_forward(*layer.down, inner.x, inner.stride, T, normed_, H);
          adapt_with(layer.adapters[kDown], inner_, normed_);
          norm({normed_, out_, nullptr, nullptr, H, stack_.eps, stack_.shape.dtype}, T);
        }
        sum_ranks();
        added = out_;
        continue;
      }
      added = join(*layer.out, layer.adapters[kOut], attended, layer.attention_out_norm, false);
      input = sum_normed(added, layer.post_norm, layer.post_norm_bias, normed_,
                         takes_tiles(*layer.gate_up));
      const Input inner = mlp(layer, input);
      const bool last = i + 1 == stack_.num_layers;  // its output is added by the caller
      added = join(*layer.down, layer.adapters[kDown], inner, layer.mlp_out_norm, last);
    }
    return error_;
  }

 private:
  void* take(int64_t width) { return activations_.take(size_.tokens * width * size_.bytes); }

  // Adapters read their input row by row.
  bool takes_tiles(const PackedLinear& linear) const {
    return tiles_.empty() && linear_takes_tiles(linear);
  }

  // residual += added; returns its norm, as tiles if asked for, or the residual itself without one.
  Input sum_normed(const void* added, const void* weight, const void* bias, void* y, bool tiled) {
    const Input residual{residual_, size_.hidden};
    if (added == nullptr && weight == nullptr) return residual;
    norm({added == nullptr ? residual_ : added, added == nullptr ? nullptr : residual_, weight, y,
          size_.hidden, stack_.eps, stack_.shape.dtype, bias, stack_.centered, stack_.wide_norms,
          0, tiled ? size_.tokens : 0},
         size_.tokens);
    return weight == nullptr ? residual : Input{y, tiled ? kTiled : size_.hidden};
  }

  // Adds a linear layer's output to the residual. An output that is normed first, or that the
  // caller asks to keep, is returned instead, for the next norm to add.
  const void* join(const PackedLinear& linear, const AdapterModule* adapters, const Input& input,
                   const void* weight, bool keep) {
    const int64_t T = size_.tokens, H = size_.hidden;
    if (weight == nullptr && !keep && stack_.all_reduce == nullptr && tiles_.empty()) {
      linear_add(linear, input.x, input.stride, T, residual_, H);
      return nullptr;
    }
    linear_forward(linear, input.x, input.stride, T, out_, H);
    adapt_with(adapters, input.x, out_);
    sum_ranks();
    if (weight != nullptr) {
      norm({out_, nullptr, weight, out_, H, stack_.eps, stack_.shape.dtype, nullptr,
            stack_.centered, stack_.wide_norms},
           T);
    }
    return out_;
  }

  // Fused and separate operations give the same bits, so a row without an adapter is unaffected by
  // rows with one.
  void adapt_with(const AdapterModule* adapters, const void* x, void* y) {
    if (!tiles_.empty() && adapters != nullptr) adapt(*adapters, tiles_, x, y);
  }

  void sum_ranks() {
    if (stack_.all_reduce == nullptr || error_ != RankError::none) return;
    error_ = stack_.all_reduce->sum(out_, size_.tokens * size_.hidden, stack_.shape.dtype);
  }

  // Returns the input of the layer's out.
  Input attend(const StackLayer& layer, const Input& input) {
    ShapeView shape = stack_.shape;
    shape.sliding_window = layer.sliding_window;
    shape.sinks = layer.sinks;
    linear_forward(*layer.qkv, input.x, input.stride, size_.tokens, qkv_, size_.qkv);
    adapt_with(layer.adapters[kQkv], input.x, qkv_);
    const bool whole = stack_.whole_qk_norm;
    if (whole) {
      const int64_t q = size_.attended, kv = int64_t{shape.num_kv_heads} * shape.head_dim;
      char* k = static_cast<char*>(qkv_) + q * size_.bytes;
      norm_part(qkv_, layer.q_norm, q);
      norm_part(k, layer.k_norm, kv);
    }
    rope_and_cache({qkv_, layer.cos_sin, query_, layer.cache, whole ? nullptr : layer.q_norm,
                    whole ? nullptr : layer.k_norm, stack_.wide_norms, stack_.eps, &batch_, shape,
                    layer.query_scales});
    const auto plan =
        plans_.try_emplace(layer.sliding_window, batch_, shape, Pool::get().size()).first;
    const bool tiled = shape.head_dim % 16 == 0 && takes_tiles(*layer.out);
    plan->second.run({query_, layer.cache, attended_, &batch_, shape, tiled});
    return {attended_, tiled ? kTiled : size_.attended};
  }

  void norm_part(void* x, const void* weight, int64_t width) {
    norm({x, nullptr, weight, x, width, stack_.eps, stack_.shape.dtype, nullptr, false,
          stack_.wide_norms, size_.qkv},
         size_.tokens);
  }

  // Returns the input of the layer's down.
  Input mlp(const StackLayer& layer, const Input& input) {
    const int64_t T = size_.tokens, I = size_.inner;
    if (tiles_.empty() && stack_.gated && stack_.activation == Activation::silu &&
        linear_can_gate(*layer.gate_up)) {
      const int64_t stride = takes_tiles(*layer.down) ? kTiled : I;
      linear_silu_mul(*layer.gate_up, input.x, input.stride, T, inner_, stride);
      return {inner_, stride};
    }
    linear_forward(*layer.gate_up, input.x, input.stride, T, gate_up_, stack_.gated ? 2 * I : I);
    adapt_with(layer.adapters[kGateUp], input.x, gate_up_);
    activate({gate_up_, inner_, I, stack_.shape.dtype, stack_.activation, stack_.gated}, T);
    return {inner_, I};
  }

  const Stack& stack_;
  const BatchView& batch_;
  const Sizes size_;
  Activations activations_;
  void* residual_;
  void* out_;
  RankError error_ = RankError::none;
  void *normed_, *mlp_normed_, *qkv_, *query_, *attended_, *inner_, *gate_up_;
  AdapterTiles tiles_;
  std::map<int32_t, AttentionPlan> plans_;  // by window; most models have one
};

}  // namespace
}  // namespace legato

// x: still to be added to the residual, or null. The last layer's output goes to `out`, not yet
// added. runs: of adapters, or null. Returns a RankError.
LEGATO_API int32_t legato_stack_run(const legato::Stack* stack, const legato::BatchView* batch,
                                    const legato::AdapterRuns* runs, const void* x, void* residual,
                                    void* out) {
  if (batch->num_tokens == 0) return 0;
  return static_cast<int32_t>(legato::Run(*stack, *batch, runs, residual, out).layers(x));
}
