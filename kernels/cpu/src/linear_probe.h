// Peak bandwidth and peak FLOPs of this machine: the roofline that benchmarks compare with.
#pragma once

#include <cstdint>

#include "isa.h"

namespace legato {

LEGATO_FOR_EACH_ISA(
    // The sum of `data`.
    float stream_read(const float* data, int64_t num_floats);
    // The best multiply-add instruction this instruction set has for bf16, `count` times over
    // independent registers. Returns the floating-point operations done.
    int64_t multiply_in_registers(int64_t count, float* sink))

namespace amx {
int64_t multiply_in_registers(int64_t count, float* sink);
}

}  // namespace legato
