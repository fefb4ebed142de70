// Convolutions and recurrences with a state of fixed size (kernels/recurrence.py).
//
// A token has the same bits in any batch and chunks: each channel, and each column of a head's
// matrix, is computed by itself, token by token, in one order of sums.
#pragma once

#include <cstdint>

#include "attention_layout.h"
#include "isa.h"

namespace legato {

// The following three, field by field in kernels/cpu/recurrence.py.

struct StateRows {
  const int32_t* query_starts;
  const int32_t* reads;   // -1: zeros
  const int32_t* writes;  // none of the rows that are read
  const int32_t* saves;   // for the states after the first tokens of slices, -1: none; or null
  const int32_t* save_lengths;
  int32_t num_slices;

  // The row for the state after this many tokens of a slice, or -1.
  int32_t save_after(int32_t slice, int64_t length) const {
    return saves != nullptr && save_lengths[slice] == length ? saves[slice] : -1;
  }
};

struct ConvArgs {
  const void* x;        // (T, C)
  const float* weight;  // (J, C), the last one the token's own
  const float* bias;    // (C), or null
  void* states;         // (R, J - 1, C)
  void* y;              // (T, C), contiguous
  int64_t x_stride;     // from row to row
  int64_t num_channels;
  int32_t num_taps;
  Dtype dtype;
  bool silu;
};

// With the delta rule: u = rate (value - key M), M decayed, and queries and keys of length 1.
// Without: u = rate value. Then M = decay M + key (x) u, and the result is query M.
struct RecurrenceArgs {
  const void* qkv;      // (T, C): queries and keys of the key heads, values of the heads
  const float* decays;  // (T, N)
  const float* rates;   // (T, N)
  float* states;        // (R, N, F, D)
  void* out;            // (T, N, D), contiguous
  int64_t qkv_stride;   // from row to row
  int64_t decays_stride;
  int64_t rates_stride;
  int32_t num_key_heads;
  int32_t num_heads;
  int32_t key_dim;
  int32_t value_dim;
  Dtype dtype;
  bool delta;
};

constexpr int kMaxTaps = 8;
constexpr int kBlockColumns = 64;  // at most, of a matrix, that a thread keeps in its first cache

// Queries and keys of some key heads as the recurrence takes them, by head and token: F floats of
// the query, F of the key.
struct ScaledKeys {
  float* data;
  int64_t num_tokens;
  int32_t first_head;
  int32_t num_heads;

  float* at(int32_t head, int64_t token, int32_t key_dim) const {
    return data + ((head - first_head) * num_tokens + token) * 2 * key_dim;
  }
};

// Some columns of the matrix of one head, over all tokens of one slice.
struct RecurrenceTask {
  int32_t slice;
  int32_t head;
  int32_t first_column;
  int32_t end_column;
};

// block: memory for key_dim x kBlockColumns floats.
LEGATO_FOR_EACH_ISA(
    void convolve(const ConvArgs& args, const StateRows& rows, int64_t first_token,
                  int64_t end_token, int64_t first_channel, int64_t end_channel);
    void scale_keys(const RecurrenceArgs& args, const ScaledKeys& keys, int64_t first_token,
                    int64_t end_token);
    void run_recurrence_task(const RecurrenceArgs& args, const StateRows& rows,
                             const ScaledKeys& keys, const RecurrenceTask& task, float* block))

}  // namespace legato
