// Quantization of weights to int8 and int4, at load.
#pragma once

#include <cstdint>

#include "isa.h"

namespace legato {

struct QuantizeArgs {
  int bits;               // 8 or 4
  int64_t group;          // values per scale
  bool scales_in_half;    // round scales to fp16 before use
  const float* clips;     // clipping ratios that are tried
  int num_clips;
};

LEGATO_FOR_EACH_ISA(
    // `count` values of one row from bf16, fp16 or float (type as in linear.h).
    void widen_row(int type, const void* from, int64_t count, float* to);
    // Quantizes one group; returns the scale of least mean squared error.
    float quantize_group(const QuantizeArgs& args, const float* weights, int64_t count,
                         int8_t* values))

}  // namespace legato
