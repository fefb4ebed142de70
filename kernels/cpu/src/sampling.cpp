// Sampling a batch on the thread pool, one task per row.

#include "sampling_kernel.h"

#include <cmath>

#include "api.h"
#include "pool.h"
#include "scratch.h"

namespace legato {
namespace {

uint64_t mix64(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// Bit for bit as in kernels/torch/sampling.py; products and sums are not fused (setup.py).
double natural_log(double x) {
  int exponent;
  double mantissa = std::frexp(x, &exponent);
  if (mantissa < 0.7071067811865476) {
    mantissa += mantissa;
    --exponent;
  }
  const double z = (mantissa - 1.0) / (mantissa + 1.0);
  const double w = z * z;
  double p = 1.0 / 15;
  for (int n = 13; n > 0; n -= 2) p = p * w + 1.0 / n;
  return exponent * 0.6931471805599453 + (z + z) * p;
}

}  // namespace

uint64_t row_key(int64_t seed, int64_t position) {
  constexpr uint64_t kGamma = 0x9E3779B97F4A7C15u;
  const uint64_t state = mix64(static_cast<uint64_t>(seed) + kGamma);
  return mix64(state + (static_cast<uint64_t>(position) + 1) * kGamma);
}

double gumbel_noise(uint64_t key, uint32_t token) {
  uint32_t x = token + static_cast<uint32_t>(key);
  x = ((x ^ (x >> 17)) * kHashFactors[0]) ^ static_cast<uint32_t>(key >> 32);
  x = (x ^ (x >> 11)) * kHashFactors[1];
  x = (x ^ (x >> 15)) * kHashFactors[2];
  const uint32_t hash = x ^ (x >> 14);
  const double above = static_cast<double>(2 * uint64_t{hash} + 1) * 0x1.0p-33;
  return -natural_log(-natural_log(1.0 - above));
}

}  // namespace legato

LEGATO_API double legato_gumbel_noise(int64_t seed, int64_t position, int64_t token) {
  return legato::gumbel_noise(legato::row_key(seed, position), static_cast<uint32_t>(token));
}

// logits: num_rows rows of `vocabulary` floats, `stride` apart. Everything else is by row. A row
// with a NaN, or whose highest logit is not finite, draws -1.
LEGATO_API void legato_sample(const float* logits, int64_t num_rows, int64_t vocabulary,
                              int64_t stride, const float* temperatures, const int32_t* top_ks,
                              const float* top_ps, const float* min_ps, const int64_t* seeds,
                              const int64_t* positions, int64_t* tokens) {
  const auto draw = LEGATO_PICK(draw_token);
  const int64_t padded = legato::padded_vocabulary(vocabulary);
  legato::Pool::get().run(num_rows, [&](int64_t i, int) {
    auto* weights =
        reinterpret_cast<float*>(legato::thread_scratch<legato::DrawArgs>((2 * padded + 16) * 4));
    const legato::DrawArgs args = {logits + i * stride, vocabulary, temperatures[i],
                                   top_ks[i],           top_ps[i],  min_ps[i],
                                   legato::row_key(seeds[i], positions[i]), 0};
    const legato::Drawn drawn = draw(args, weights, weights + padded);
    tokens[i] = std::isfinite(drawn.score) ? drawn.token : -1;
  });
}

// Gumbel-max over a shard of the vocabulary: the token of the highest score, and that score.
LEGATO_API void legato_gumbel_argmax(const float* logits, int64_t num_rows, int64_t vocabulary,
                            int64_t stride, const float* temperatures, const int64_t* seeds,
                            const int64_t* positions, int64_t first_id, double* scores,
                            int64_t* tokens) {
  const auto draw = LEGATO_PICK(draw_token);
  legato::Pool::get().run(num_rows, [&](int64_t i, int) {
    const uint64_t key = legato::row_key(seeds[i], positions[i]);
    const legato::Drawn drawn = draw(
        {logits + i * stride, vocabulary, temperatures[i], 0, 1.0f, 0.0f, key, first_id}, nullptr,
        nullptr);
    scores[i] = drawn.score;
    tokens[i] = drawn.token;
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
