// How fast this machine reads memory: the ceiling a decode step is measured against.
#pragma once

#include <cstdint>

#include "isa.h"

namespace legato {

LEGATO_FOR_EACH_ISA(float stream_read(const float* data, int64_t num_floats))

}  // namespace legato
