// Where packed weights live: big regions of huge pages, filled one weight after another.
//
// Weights packed in the order they are used lie in that order in memory, with few address
// translations between them. A region is given back when its last weight is freed.
#pragma once

#include <cstdint>
#include <memory>

namespace legato {

struct WeightMemory {
  std::shared_ptr<void> region;
  char* data;  // zeroed, 4096-byte aligned
};

// Throws std::bad_alloc.
WeightMemory allocate_weight(int64_t num_bytes);

}  // namespace legato
