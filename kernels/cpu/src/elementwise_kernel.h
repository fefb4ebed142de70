// Norms, activation, rotation and cache writes, a range of tokens at a time.
//
// Arithmetic is float; values are rounded to the model's type exactly where Hugging Face's Llama
// rounds when it runs in that type, so that bf16 logits stay close to it. One exception: silu stays
// float until it is multiplied, as linear_silu_mul has it.
#pragma once

#include <cstdint>

#include "attention_layout.h"
#include "isa.h"

namespace legato {

// y = weight * round(x / rms(x)); with `residual`, first residual += x, and its norm is taken.
struct NormArgs {
  const void* x;
  void* residual;  // or null
  const void* weight;
  void* y;
  int64_t width;
  float eps;
  Dtype dtype;
};

// y = round(silu(gate) * up)
struct SiluArgs {
  const void* gate_up;  // (T, 2 I): gate, then up
  void* y;              // (T, I)
  int64_t width;        // I
  Dtype dtype;
};

struct RopeArgs {
  const void* qkv;  // (T, (N + 2 G) D)
  const float* cos_sin;
  void* query;  // (T, N, D)
  void* cache;
  const void* q_norm;  // (D), or null
  const void* k_norm;
  float eps;
  const BatchView* batch;
  ShapeView shape;
};

LEGATO_FOR_EACH_ISA(
    void norm_rows(const NormArgs& args, int64_t begin, int64_t end);
    void silu_rows(const SiluArgs& args, int64_t begin, int64_t end);
    void rope_rows(const RopeArgs& args, int64_t begin, int64_t end))

// Whole operations on the pool. Few rows run on the calling thread: a hand-over would cost more.
void norm(const NormArgs& args, int64_t num_rows);
void silu_mul(const SiluArgs& args, int64_t num_rows);
void rope_and_cache(const RopeArgs& args);

}  // namespace legato
