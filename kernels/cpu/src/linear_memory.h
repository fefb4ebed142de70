// Arena for packed weights: large regions of huge pages, filled one weight after another.
//
// Weights packed in order of use are contiguous in that order, so a step takes few TLB misses. A
// region is unmapped when its last weight is freed.
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
