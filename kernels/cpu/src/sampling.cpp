// A batch of draws on the pool, a row a task.

#include "sampling_kernel.h"

#include "api.h"
#include "pool.h"
#include "stack_memory.h"

namespace legato {
namespace {

uint64_t mix64(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

}  // namespace

// kernels/random_stream.py: the same bits.
double uniform(int64_t seed, int64_t position) {
  constexpr uint64_t kGamma = 0x9E3779B97F4A7C15u;
  const uint64_t state = mix64(static_cast<uint64_t>(seed) + kGamma);
  const uint64_t drawn = mix64(state + (static_cast<uint64_t>(position) + 1) * kGamma);
  return static_cast<double>(drawn >> 11) * 0x1.0p-53;
}

}  // namespace legato

LEGATO_API double legato_uniform(int64_t seed, int64_t position) {
  return legato::uniform(seed, position);
}

// logits: num_rows rows of `vocabulary` floats, `stride` apart. Everything else is by row.
LEGATO_API void legato_sample(const float* logits, int64_t num_rows, int64_t vocabulary,
                              int64_t stride, const float* temperatures, const int32_t* top_ks,
                              const float* top_ps, const float* min_ps, const int64_t* seeds,
                              const int64_t* positions, int64_t* tokens) {
  const auto draw = LEGATO_PICK(draw_token);
  const int64_t padded = legato::padded_vocabulary(vocabulary);
  legato::Pool::get().run(num_rows, [&](int64_t i, int) {
    auto* weights =
        reinterpret_cast<float*>(legato::thread_memory<legato::DrawArgs>((2 * padded + 16) * 4));
    tokens[i] = draw({logits + i * stride, vocabulary, temperatures[i], top_ks[i], top_ps[i],
                      min_ps[i], legato::uniform(seeds[i], positions[i])},
                     weights, weights + padded);
  });
}

LEGATO_API void legato_chosen_logprobs(const float* logits, int64_t num_rows, int64_t vocabulary,
                                       int64_t stride, const int64_t* tokens, int64_t num_top,
                                       float* logprobs, int64_t* ranks, float* top,
                                       int64_t* top_ids) {
  const auto find = LEGATO_PICK(token_logprobs);
  legato::Pool::get().run(num_rows, [&](int64_t i, int) {
    find({logits + i * stride, vocabulary, tokens[i], num_top, logprobs + i, ranks + i,
          top + i * num_top, top_ids + i * num_top});
  });
}
