// Norms, activation, rotation and cache writes, a range of tokens at a time.
//
// Arithmetic is float; values are rounded to the model's type exactly where Hugging Face's Llama
// rounds when it runs in that type, so that bf16 logits stay close to it. One exception: a gate's
// activation stays float until it is multiplied, as linear_silu_mul has it.
#pragma once

#include <cstdint>

#include "attention_layout.h"
#include "isa.h"

namespace legato {

// y = weight * round(x / rms(x)); with `residual`, first residual += x, and its norm is taken.
// centered: y = round(weight * (x - mean) / deviation + bias) instead. wide: weights are float, as
// those of Gemma, where y is rounded once.
struct NormArgs {
  const void* x;
  void* residual;      // or null
  const void* weight;  // or null: only the residual is added to
  void* y;             // may be x
  int64_t width;
  float eps;
  Dtype dtype;
  const void* bias = nullptr;
  bool centered = false;
  bool wide = false;
  int64_t stride = 0;  // of the rows of x and y, where it is not the width; then without residual
  int64_t tiled_rows = 0;  // where y is written as tiles (tiles.h): all of its rows
};

// In the order of `ACTIVATIONS` in kernels/layer_form.py.
enum class Activation : int32_t { silu, gelu, gelu_tanh, relu, clamped_swiglu, relu2 };

// y = round(f(x)), or gated round(f(gate) * up); clamped_swiglu clamps up and adds one
struct ActivateArgs {
  const void* x;  // (T, I), or gated (T, 2 I): gate, then up
  void* y;        // (T, I)
  int64_t width;  // I
  Dtype dtype;
  Activation activation;
  bool gated;
};

// MoE combine: y[assignment / experts_per_token] += round(x * topk_weights[assignment]), by row of
// x.
struct CombineArgs {
  const void* x;          // (T, H)
  const float* topk_weights;   // by assignment
  const int64_t* assignments;  // of each row
  void* y;                // (T, H)
  int64_t experts_per_token;
  int64_t width;  // H
  Dtype dtype;
};

struct RopeArgs {
  const void* qkv;  // (T, (N + 2 G) D)
  const float* cos_sin;
  void* query;  // (T, N, D)
  void* cache;
  const void* q_norm;  // (D), or null
  const void* k_norm;
  bool wide_norms;  // as in NormArgs
  float eps;
  const BatchView* batch;
  ShapeView shape;
  const float* query_scales = nullptr;  // by position, of the rotated query; null: none
};

LEGATO_FOR_EACH_ISA(
    void norm_rows(const NormArgs& args, int64_t begin, int64_t end);
    void activate_rows(const ActivateArgs& args, int64_t begin, int64_t end);
    void combine_rows(const CombineArgs& args, int64_t begin, int64_t end);
    void rope_rows(const RopeArgs& args, int64_t begin, int64_t end))

// Whole operations on the thread pool. Few rows run on the calling thread, without a hand-over.
void norm(const NormArgs& args, int64_t num_rows);
void activate(const ActivateArgs& args, int64_t num_rows);
void moe_combine(const CombineArgs& args, int64_t num_rows);
void rope_and_cache(const RopeArgs& args);

}  // namespace legato
