// Drawing one token from one row of logits; the semantics are those of kernels/torch_sampling.py.
//
// Nothing is sorted. With weights e = exp((logit - max) / temperature), top_k and top_p both keep a
// prefix of the tokens in falling order of e, so each is one number: the weight of the last token
// kept (and how many of its equals, lowest ids first). That number is searched for.
#pragma once

#include <cstdint>

#include "isa.h"

namespace legato {

constexpr int64_t kSumBlock = 1024;  // weights are summed in blocks; a draw finds its block first

struct DrawArgs {
  const float* logits;
  int64_t vocabulary;
  float temperature;  // 0: the highest logit
  int32_t top_k;      // 0: off
  float top_p;
  float min_p;
  double u;  // in [0, 1)
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
    int64_t draw_token(const DrawArgs& args, float* weights, float* candidates);
    void token_logprobs(const LogprobArgs& args))

}  // namespace legato
