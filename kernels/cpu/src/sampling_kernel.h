// Drawing one token from one row of logits; the semantics are those of kernels/torch/sampling.py.
//
// Nothing is sorted. With the weights e = exp((logit - max) / temperature), top_k and top_p both
// keep a prefix of the tokens in falling order of e, so each is one number: the weight of the last
// token kept (and how many of its equals, lowest ids first). That number is searched for. The
// Gumbel-max trick then draws among the kept tokens (sampling_gumbel.h).
#pragma once

#include <cstdint>

#include "isa.h"

namespace legato {

constexpr int64_t kSumBlock = 1024;  // weights are summed in blocks

// The key of a row, from its seed and the position of the token to be drawn, and the Gumbel noise
// of a token under that key: see kernels/random_stream.py and kernels/torch/sampling.py.
uint64_t row_key(int64_t seed, int64_t position);
double gumbel_noise(uint64_t key, uint32_t token);
constexpr uint32_t kHashFactors[3] = {0xED5AD4BBu, 0xAC4C1B51u, 0x31848BABu};

struct DrawArgs {
  const float* logits;
  int64_t vocabulary;
  float temperature;  // 0: the highest logit
  int32_t top_k;      // 0: off
  float top_p;
  float min_p;
  uint64_t key;
  int64_t first_id;  // of the first logit; 0 where top_k, top_p or min_p are asked for
};

struct Drawn {
  int64_t token;
  double score;  // perturbed logit; the highest one at temperature 0 and where it is not finite
};

// Scratch of one row, floats: weights, then candidates of the search, each padded.
inline int64_t padded_vocabulary(int64_t vocabulary) {
  return (vocabulary + kSumBlock - 1) / kSumBlock * kSumBlock;
}

struct LogprobArgs {
  const float* logits;
  int64_t vocabulary;
  int64_t token;
  int64_t num_top;
  float* logprob;
  int64_t* rank;
  float* top;        // [num_top], best first, lower id first among equals
  int64_t* top_ids;
};

LEGATO_FOR_EACH_ISA(
    Drawn draw_token(const DrawArgs& args, float* weights, float* candidates);
    void token_logprobs(const LogprobArgs& args))

}  // namespace legato
