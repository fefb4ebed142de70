// Sampling and log-probabilities of one row; see sampling_kernel.h.

#include "sampling_kernel.h"
#include "sampling_gumbel.h"
#include "sampling_search.h"

namespace legato::LEGATO_ISA {
namespace {

constexpr float kInfinity = __builtin_inff();

Vec load_or(const float* p, int64_t left, float otherwise) {
  if (left >= Vec::kLanes) return Vec::load(p);
  float lanes[Vec::kLanes];
  for (int i = 0; i < Vec::kLanes; ++i) lanes[i] = i < left ? p[i] : otherwise;
  return Vec::load(lanes);
}

// Bit i: whether lane i of a or of b is NaN.
uint32_t nan_lanes(Vec a, Vec b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(a.v, b.v, _CMP_UNORD_Q);
#else
  return _mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_UNORD_Q));
#endif
}

// NaN if one is: a maximum alone would forget it.
float highest(const float* logits, int64_t n) {
  Vec most[4];
  for (Vec& m : most) m = Vec::set(-kInfinity);
  uint32_t nan = 0;
  int64_t i = 0;
  for (; i + 4 * Vec::kLanes <= n; i += 4 * Vec::kLanes) {
    Vec x[4];
    for (int k = 0; k < 4; ++k) x[k] = Vec::load(logits + i + k * Vec::kLanes);
    for (int k = 0; k < 4; ++k) most[k] = max(most[k], x[k]);
    nan |= nan_lanes(x[0], x[1]) | nan_lanes(x[2], x[3]);
  }
  for (; i < n; i += Vec::kLanes) {
    const Vec x = load_or(logits + i, n - i, -kInfinity);
    most[0] = max(most[0], x);
    nan |= nan_lanes(x, x);
  }
  if (nan != 0) return __builtin_nanf("");
  return max(max(most[0], most[1]), max(most[2], most[3])).max();
}

// Bit i: whether lane i of x is `value`.
uint32_t equal_lanes(Vec x, float value) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(value), _CMP_EQ_OQ);
#else
  return _mm256_movemask_ps(_mm256_cmp_ps(x.v, _mm256_set1_ps(value), _CMP_EQ_OQ));
#endif
}

int64_t first_equal(const float* logits, int64_t n, float value) {
  int64_t i = 0;
  for (; i + Vec::kLanes <= n; i += Vec::kLanes) {
    const uint32_t lanes = equal_lanes(Vec::load(logits + i), value);
    if (lanes != 0) return i + __builtin_ctz(lanes);
  }
  for (; i < n; ++i) {
    if (logits[i] == value) return i;
  }
  return 0;  // a row with NaN
}

// out = exp((logit - most) * inverse_temperature), padded with zeros to whole blocks; their sum.
double weigh(const float* logits, int64_t n, float most, float inverse_temperature, float* out) {
  const Vec scale = Vec::set(inverse_temperature), top = Vec::set(most);
  double total = 0.0;
  for (int64_t begin = 0; begin < n; begin += kSumBlock) {
    const float* from = logits + begin;
    float padded[kSumBlock];
    if (n - begin < kSumBlock) {
      for (int64_t i = 0; i < kSumBlock; ++i) padded[i] = begin + i < n ? from[i] : -kInfinity;
      from = padded;
    }
#pragma GCC unroll 2
    for (int64_t i = 0; i < kSumBlock; i += Vec::kLanes) {
      weight_of((Vec::load(from + i) - top) * scale).store(out + begin + i);
    }
    total += sum_from(out + begin, kSumBlock, 0.0f);
  }
  return total;
}

// Of the weights equal to the cut, sets all but the first `ties` to 0: lower ids rank higher.
void drop_ties(float* weights, int64_t n, const Cut& cut) {
  if (cut.equals <= cut.ties) return;
  int64_t seen = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (weights[i] == cut.value && ++seen > cut.ties) weights[i] = 0.0f;
  }
}

}  // namespace

Drawn draw_token(const DrawArgs& args, float* weights, float* candidates) {
  const int64_t n = args.vocabulary;
  const float most = highest(args.logits, n);
  const int64_t best = first_equal(args.logits, n, most);
  if (!(args.temperature > 0.0f) || !(__builtin_fabsf(most) < kInfinity)) {
    return {args.first_id + best, most};
  }
  const float sharpest = 3.0e38f;
  const float reciprocal = 1.0f / args.temperature;
  const float inverse = reciprocal < sharpest ? reciprocal : sharpest;
  const GumbelArgs args_of_row = {args.logits, n, inverse, args.key, args.first_id};
  const bool cuts = (args.top_k > 0 && args.top_k < n) || args.top_p < 1.0f;
  float floor = args.min_p < 1.0f ? args.min_p : 1.0f;  // the highest weight is 1
  if (!cuts) return gumbel_argmax<false>(args_of_row, best, nullptr, floor);

  const double all = weigh(args.logits, n, most, inverse, weights);
  double total = all;
  if (args.top_k > 0 && args.top_k < n) {
    const Cut cut = find_cut<Measure::count>(weights, n, 0.0f, args.top_k, candidates);
    drop_ties(weights, n, cut);
    floor = cut.value > floor ? cut.value : floor;
    if (args.top_p < 1.0f) total = sum_from(weights, padded_vocabulary(n), cut.value);
  }
  if (args.top_p < 1.0f) {
    const double mass = static_cast<double>(args.top_p) * total;
    // All tokens below this together weigh less than the mass outside the nucleus.
    const auto needless = static_cast<float>(0.999 * (total - mass) / static_cast<double>(n));
    const float lowest = needless > floor ? needless : floor;
    const Cut cut =
        find_cut<Measure::mass>(weights, n, lowest < 1.0f ? lowest : 1.0f, mass, candidates);
    drop_ties(weights, n, cut);
    floor = cut.value > floor ? cut.value : floor;
  }
  return gumbel_argmax<true>(args_of_row, best, weights, floor);
}

void token_logprobs(const LogprobArgs& args) {
  const float* logits = args.logits;
  const int64_t n = args.vocabulary;
  const float most = highest(logits, n);
  double sum = 0.0;
  float weights[kSumBlock];
  for (int64_t begin = 0; begin < n; begin += kSumBlock) {
    const int64_t count = n - begin < kSumBlock ? n - begin : kSumBlock;
    sum += weigh(logits + begin, count, most, 1.0f, weights);
  }
  const double log_sum = __builtin_log(sum) + most;
  const float chosen = logits[args.token];
  *args.logprob = static_cast<float>(chosen - log_sum);
  int64_t rank = 1;
  for (int64_t i = 0; i < n; ++i) rank += logits[i] > chosen ? 1 : 0;
  *args.rank = rank;

  int64_t held = 0;  // the best so far, sorted; few tokens pass the worst of them
  float worst = -kInfinity;
  for (int64_t i = 0; i < n; ++i) {
    const float x = logits[i];
    if (held == args.num_top && !(x > worst)) continue;
    if (held == args.num_top && held == 0) break;
    int64_t at = held < args.num_top ? held++ : held - 1;
    for (; at > 0 && args.top[at - 1] < x; --at) {
      args.top[at] = args.top[at - 1];
      args.top_ids[at] = args.top_ids[at - 1];
    }
    args.top[at] = x;
    args.top_ids[at] = i;
    worst = held == args.num_top ? args.top[held - 1] : -kInfinity;
  }
  for (int64_t i = 0; i < held; ++i) {
    args.top[i] = static_cast<float>(args.top[i] - log_sum);
  }
}

}  // namespace legato::LEGATO_ISA
