// Grow-only scratch memory of the calling thread, 64-byte aligned.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace legato {

inline int64_t round_to_lines(int64_t num_bytes) { return (num_bytes + 63) / 64 * 64; }

// Rounds num_bytes up to what it allocates: large buffers on huge pages, where the system grants
// them. Null: no memory.
inline char* allocate_scratch(int64_t& num_bytes) {
  constexpr int64_t kHugePage = int64_t{2} << 20;
  num_bytes = round_to_lines(num_bytes);
  if (num_bytes < kHugePage / 2) return static_cast<char*>(std::aligned_alloc(64, num_bytes));
  num_bytes = (num_bytes + kHugePage - 1) / kHugePage * kHugePage;
  char* memory = static_cast<char*>(std::aligned_alloc(kHugePage, num_bytes));
  if (memory != nullptr) madvise(memory, num_bytes, MADV_HUGEPAGE);
  return memory;
}

// One buffer per thread and `Owner`; its contents do not survive a call.
template <class Owner>
char* thread_scratch(int64_t num_bytes) {
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  thread_local std::unique_ptr<char, Free> memory;
  thread_local int64_t size = 0;
  if (size < num_bytes) {
    memory.reset();
    size = 0;
    memory.reset(allocate_scratch(num_bytes));
    if (memory == nullptr) throw std::bad_alloc();
    size = num_bytes;
  }
  return memory.get();
}

}  // namespace legato
