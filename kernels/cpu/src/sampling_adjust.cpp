// Logits processors of one row (biases, penalties, masks), in the order of
// kernels/torch/sampling.py.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "api.h"
#include "pool.h"

namespace legato {

// Field by field in kernels/cpu/sampling.py. Token ids lie within the vocabulary.
struct Adjustment {
  float* logits;
  const int32_t* prompt;
  const int32_t* output;
  const int64_t* bias_ids;
  const float* biases;
  const int64_t* forbidden;
  const int32_t* allowed;  // bit mask, or null
  int64_t num_prompt, num_output, num_biases, num_forbidden;
  float repetition;
  double presence, frequency;
};

namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

void penalize_repetition(const Adjustment& a, int64_t vocabulary) {
  thread_local std::vector<uint64_t> seen;
  seen.assign((vocabulary + 63) / 64, 0);
  const auto visit = [&](const int32_t* tokens, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      uint64_t& word = seen[tokens[i] / 64];
      const uint64_t bit = uint64_t{1} << (tokens[i] % 64);
      if (word & bit) continue;
      word |= bit;
      float& logit = a.logits[tokens[i]];
      logit = logit > 0.0f ? logit / a.repetition : logit * a.repetition;
    }
  };
  visit(a.prompt, a.num_prompt);
  visit(a.output, a.num_output);
}

void penalize_output(const Adjustment& a) {
  thread_local std::vector<int32_t> sorted;
  sorted.assign(a.output, a.output + a.num_output);
  std::sort(sorted.begin(), sorted.end());
  for (size_t i = 0; i < sorted.size();) {
    size_t end = i + 1;
    while (end < sorted.size() && sorted[end] == sorted[i]) ++end;
    const double penalty = a.frequency * static_cast<double>(end - i) + a.presence;
    a.logits[sorted[i]] -= static_cast<float>(penalty);
    i = end;
  }
}

void mask(const Adjustment& a, int64_t vocabulary) {
  for (int64_t first = 0; first < vocabulary; first += 32) {
    const auto bits = static_cast<uint32_t>(a.allowed[first / 32]);
    if (bits == 0xffffffffu) continue;
    const int64_t count = std::min<int64_t>(32, vocabulary - first);
    for (int64_t i = 0; i < count; ++i) {
      if (!(bits >> i & 1)) a.logits[first + i] = kNever;
    }
  }
}

void forbid(const Adjustment& a, int64_t vocabulary) {
  thread_local std::vector<float> before;
  before.clear();
  for (int64_t i = 0; i < a.num_forbidden; ++i) before.push_back(a.logits[a.forbidden[i]]);
  for (int64_t i = 0; i < a.num_forbidden; ++i) a.logits[a.forbidden[i]] = kNever;
  if (a.allowed == nullptr) return;
  const bool some = std::any_of(a.logits, a.logits + vocabulary,
                                [](float logit) { return logit > kNever; });
  // A grammar that allows nothing but a stop token outranks min_tokens.
  for (int64_t i = 0; !some && i < a.num_forbidden; ++i) a.logits[a.forbidden[i]] = before[i];
}

void adjust(const Adjustment& a, int64_t vocabulary) {
  for (int64_t i = 0; i < a.num_biases; ++i) a.logits[a.bias_ids[i]] += a.biases[i];
  if (a.repetition != 1.0f) penalize_repetition(a, vocabulary);
  if (a.num_output > 0 && (a.presence != 0.0 || a.frequency != 0.0)) penalize_output(a);
  if (a.allowed != nullptr) mask(a, vocabulary);
  if (a.num_forbidden > 0) forbid(a, vocabulary);
}

}  // namespace
}  // namespace legato

LEGATO_API void legato_adjust(const legato::Adjustment* rows, int64_t num_rows,
                              int64_t vocabulary) {
  legato::Pool::get().run(num_rows,
                          [&](int64_t i, int) { legato::adjust(rows[i], vocabulary); });
}
